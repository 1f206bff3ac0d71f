"""Expert and tensor parallelism on two GPUs with nccl: every form beside fp64, judged by what one process reaches.
Called by pytest with -m gpu, where there are two GPUs; what their processes run is in parallel_jobs.py.
"""

import itertools

import parallel_jobs as jobs
import pytest
import torch
from oracle import KERNEL_TOLERANCE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
FORMATS = ["bf16", "nvfp4", "mxfp8"]
SPREAD = ["ep", "2x1", "1x2"]  # meshes of ExpertParallel


@pytest.fixture
def run(ranks):
    """``run(function, *args)`` calls ``function(*args)`` in both processes -> the results by rank."""
    return lambda function, *args: ranks(2, "nccl")(jobs.within, function, *args, timeout=150)


def check(answers):
    """bf16 sums of two ranks, rounded twice where one process rounds once."""
    for errors in answers:
        for name, (error, of_one) in errors.items():
            assert error <= max(1.5 * of_one, 2 * KERNEL_TOLERANCE[torch.bfloat16]), (name, error, of_one)
            assert of_one < 2e-2, (name, of_one)


def cases():
    """Meshes, exchanges and formats, all of them; the numbers of tokens take turns."""
    turns = itertools.cycle(["few", "one rank alone", "none"])
    for mesh, exchange, format in itertools.product(SPREAD, jobs.EXCHANGES, FORMATS):
        yield mesh, exchange, format, next(turns)
    for format in FORMATS:
        yield "tp", "exact", format, next(turns)


@pytest.mark.parametrize(("mesh", "exchange", "format", "also"), list(cases()))
def test_layer(run, mesh, exchange, format, also):
    for tokens in ("many", also):
        for train in (False, True) if exchange != "symmetric" else (False,):
            check(run(jobs.run_layer, mesh, exchange, format, tokens, train))


@pytest.mark.parametrize("recipe", ["fp8", "mxfp8"])
@pytest.mark.parametrize("capacity", [None, jobs.ROOM])
def test_rows_travel_in_8_bits(run, recipe, capacity):
    for errors in run(jobs.rows_in_8_bits, recipe, capacity):
        assert max(errors) < 1e-2


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", jobs.FORMS)
@pytest.mark.parametrize(
    ("mesh", "exchange"), [("ep", "exact"), ("ep", "capacity"), ("tp", "exact"), ("2x1", "capacity"), ("1x2", "exact")]
)
def test_experts(run, mesh, exchange, kind, format):
    if "bias" in kind and mesh != "ep":
        kind = "mlp, clamped"
    for splits in jobs.SPLITS:
        check(run(jobs.run_experts, mesh, exchange, kind, format, splits))


QUIET = [*itertools.product(SPREAD, ["capacity", "gather, capacity", "symmetric"]), ("tp", "exact")]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("mesh", "exchange"), QUIET)
def test_nothing_waits_and_graphs_take_other_tokens(run, mesh, exchange, format):
    for train in (False, True) if exchange != "symmetric" else (False,):
        for errors in run(jobs.quiet, mesh, exchange, format, train):
            # Rows of 16-bit weights come of index_select, whose backward adds the A rows of a token in bf16 by atomics:
            # an order that is not fixed, and A - 1 roundings of 2**-9.
            assert max(errors) <= ((jobs.A - 1) * 2**-9 if train and format == "bf16" else 1e-3)


COMPILED = [
    ("ep", "exact", "nvfp4", False),
    ("ep", "exact", "mxfp8", False),
    ("ep", "capacity", "bf16", True),
    ("ep", "gather, capacity", "nvfp4", True),
    ("ep", "symmetric", "mxfp8", False),
    ("1x2", "symmetric", "bf16", False),
    ("2x1", "capacity", "nvfp4", True),
    ("1x2", "gather, capacity", "mxfp8", True),
    ("1x2", "exact", "nvfp4", False),
    ("tp", "exact", "bf16", True),
    ("tp", "exact", "mxfp8", True),
]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(("mesh", "exchange", "format", "train"), COMPILED)
def test_compiled(run, mesh, exchange, format, train, backend):
    # Inductor keeps float32 between operators that it fuses, where plain calls round to bf16: each is off by so much.
    bound = KERNEL_TOLERANCE[torch.bfloat16] * (2 if backend == "inductor" else 1)
    for errors in run(jobs.compiled_layer, mesh, exchange, format, train, backend):
        assert max(errors) < bound


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("mesh", "other"), [("2x1", "tp"), ("1x2", "ep"), ("ep", "1x2"), ("tp", "2x1")])
def test_checkpoints(run, mesh, other, format, tmp_path):
    assert run(jobs.saved, mesh, other, format, str(tmp_path)) == [True, True]
