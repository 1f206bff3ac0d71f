"""Expert and tensor parallelism on two and four processes with gloo, beside one process.
Called by pytest; calls programs.py in each process.

The processes are started once; what a test runs in them is in programs.py.
"""

import programs
import pytest
import torch
from fast_cases import others_slow

from thunder_moe import GroupedSwiGLU
from thunder_moe.parallel import ExpertParallel, TensorParallel, exchange, expert_load

TOLERANCE = 1e-5  # float32; sums of ranks are added in another order
# Rows of each of eight experts.
SPLITS = {"even": [2] * 8, "ragged": [0, 5, 0, 0, 1, 0, 0, 3], "all on the last": [0] * 7 + [4], "none": [0] * 8}


@pytest.mark.parametrize("quantized", [False, True, "mxfp8"], ids=["float32", "nvfp4", "mxfp8"])
@pytest.mark.parametrize("style", programs.STYLES)
@pytest.mark.parametrize("tokens", programs.TOKENS)
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.covering(2)
def test_layer_is_that_of_one_process(run, count, tokens, style, quantized):
    assert max(run(programs.run_layer, count, style, tokens, quantized, False, first=count)) < TOLERANCE


@pytest.mark.parametrize("style", programs.STYLES)
def test_all_tokens_go_to_one_rank(run, style):
    assert max(run(programs.run_layer, 4, style, "ragged", True, True)) < TOLERANCE


@pytest.mark.parametrize("quantized", [False, True, "mxfp8"], ids=["float32", "nvfp4", "mxfp8"])
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("kind", ["swiglu", "mlp", "mlp, bias", "mlp, srelu", "mlp, interleaved"])
@pytest.mark.parametrize("style", ["exact", "capacity", "tensor"])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.covering(2)
def test_experts_are_those_of_one_process(run, count, style, kind, splits, quantized):
    if style == "tensor" and kind == "mlp, bias":
        kind = "mlp"
    style = "roomy" if style == "capacity" else style
    assert max(run(programs.run_experts, count, style, kind, quantized, SPLITS[splits], first=count)) < TOLERANCE


def test_experts_with_an_8_bit_recipe(run):
    """All rows of an expert come from one rank, because the gradient of a weight depends on which rows it rounds."""
    splits = [37] + [0] * (programs.E - 1)
    assert max(run(programs.run_experts, 2, "exact", "mlp, fp8", False, splits, first=2)) < TOLERANCE


@pytest.mark.parametrize("recipe", ["fp8", "mxfp8", None])
@pytest.mark.parametrize("capacity", [None, 20])
def test_rows_travel_in_8_bits(run, recipe, capacity):
    assert max(run(programs.run_rows_in_8_bits, recipe, capacity, first=2)) < TOLERANCE


ALL_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize(("recipe", "checks"), [("fp8", ALL_CHECKS), ("mxfp8", "test_faketensor")])
def test_operators_of_rows_in_8_bits(run, recipe, checks):
    """Check all of one recipe, and the shapes of the other: nothing else depends on it."""
    run(programs.opcheck_of_rows_in_8_bits, recipe, checks, first=2)


@pytest.mark.parametrize(("recipe", "scales"), [("fp8", 4), ("mxfp8", 2)])
def test_rows_in_8_bits_have_half_the_bytes(run, recipe, scales):
    rows, codes = 2 * programs.H, programs.H
    for sent in run(programs.bytes_in_8_bits, recipe, first=2):
        assert sent == [4 * 2 * programs.A, codes, scales, rows, codes, scales, rows]  # the routing is first


@pytest.mark.parametrize("quantized", [False, True, "mxfp8"], ids=["float32", "nvfp4", "mxfp8"])
@pytest.mark.parametrize(("count", "shared"), [(2, 1), (4, 0), (4, 2)])
def test_tensor_parallel_layer_is_that_of_one_process(run, count, shared, quantized):
    assert max(run(programs.run_tensor_layer, count, quantized, shared, first=count)) < TOLERANCE


BOTH = [("exact", "ragged", False), ("capacity", "even", "mxfp8"), ("gather", "one rank alone", True)]


@pytest.mark.parametrize(("style", "tokens", "quantized"), [*BOTH, ("chunks", "none", True)])
def test_experts_and_features_at_once(run, style, tokens, quantized):
    assert max(run(programs.run_both_layer, style, tokens, quantized)) < TOLERANCE


@pytest.mark.parametrize(("kind", "quantized"), [("swiglu", True), ("mlp", False), ("mlp", True)])
def test_rows_of_experts_that_are_cut_both_ways(run, kind, quantized):
    assert max(run(programs.run_both_experts, kind, quantized)) < TOLERANCE


@pytest.mark.parametrize("quantized", [True, False])
def test_checkpoints_of_both_at_once(run, tmp_path, quantized):
    assert run(programs.saved_from_both, quantized, str(tmp_path)) == [True] * 4


SUMS = [(2, "even", 1), (4, "ragged", 1), (2, "one rank alone", 1), (4, "none", 1), (2, "even", 2)]


@pytest.mark.parametrize(("count", "tokens", "chunks"), SUMS)
def test_sums_that_travel_while_others_are_added_up(run, count, tokens, chunks):
    assert max(run(programs.sums_while_they_travel, count, tokens, chunks, first=count)) < TOLERANCE


@pytest.mark.parametrize("count", [2, 4])
def test_an_exchange_of_the_user(run, count):
    assert max(run(programs.own_exchange, count, "ragged", first=count)) < TOLERANCE


@pytest.mark.parametrize(("capacity", "dropped"), [(2, 6), (5, 0)])
def test_tokens_without_room_are_counted(run, capacity, dropped):
    assert run(programs.overflow, capacity) == [dropped] * 4


def test_a_recomputed_forward_is_no_step_of_its_own(run):
    for plain, recomputed in run(programs.recomputed, first=2):
        assert recomputed == plain
        assert plain[0] == 1
        assert plain[1] > 0


@pytest.mark.parametrize("style", ["expert", "tensor"])
def test_optimizers_and_clipped_gradients(run, style):
    assert max(run(programs.trained, style, first=2)) < 1e-4  # AdamW divides by small gradients


@pytest.mark.parametrize("quantized", [False, "mxfp8"])
def test_fully_shard_over_another_dimension(run, quantized):
    assert max(run(programs.sharded_otherwise, quantized)) < TOLERANCE


COMPILED = [("exact", True, False), ("gather, capacity", False, True)]
MORE_COMPILED = [("capacity", True, True), ("exact", False, True), ("gather, capacity", True, False)]
SAVED = [
    (2, "tensor", True, "tiled_64x64"),
    (2, "expert", False, ""),
    (2, "expert", "mxfp8", "tiled_64x64"),
    (4, "tensor", "mxfp8", "linear"),
    # Of both at once, the test above saves these two.
    pytest.param(2, "expert", True, "auto", marks=pytest.mark.exhaustive),
    pytest.param(4, "tensor", False, "", marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("style", "quantized", "train"), [*COMPILED, *others_slow(MORE_COMPILED, exhaustive=True)])
@pytest.mark.slow
def test_compiled_layer(run, style, quantized, train):
    assert max(run(programs.compiled, style, quantized, train, first=2)) < TOLERANCE


@pytest.mark.exhaustive  # test_compiled_shards.py runs it with the backend
def test_compiled_tensor_parallel_layer(run):
    assert max(run(programs.compiled_tensor, True, first=2)) < TOLERANCE


@pytest.mark.parametrize(("count", "style", "quantized", "layout"), SAVED)
def test_checkpoints_are_resharded(run, tmp_path, count, style, quantized, layout):
    assert run(programs.saved, count, style, quantized, layout, str(tmp_path)) == [True] * 4


@pytest.mark.parametrize(("style", "quantized"), [("expert", True), ("tensor", True), ("expert", False)])
def test_no_rank_holds_a_whole_layer_that_it_loads(run, tmp_path, style, quantized):
    assert max(run(programs.loaded_from_meta, style, quantized, str(tmp_path))) < TOLERANCE


def test_weights_are_those_of_the_first_rank(run):
    assert run(programs.source_of_weights) == [True] * 4


REFUSED = {
    "experts": (4, programs.uneven, ExpertParallel(), "num_experts=6, wanted a multiple of 4"),
    "4-bit experts": (4, programs.uneven_quantized, ExpertParallel(), "num_experts=6 .* wanted a multiple of 4"),
    "features": (4, programs.narrow, TensorParallel(), "wanted a multiple of"),
    "4-bit features": (4, programs.narrow_quantized, TensorParallel(), "in_features=32 .*, wanted a multiple of 64"),
    "blocks": (4, programs.narrow_blocks, TensorParallel(), "in_features=64 .*, wanted a multiple of 128"),
    "tiles": (4, programs.narrow_tiles, TensorParallel(), "layout 'tiled_64x64', wanted a multiple of 512"),
    "twice": (2, programs.parallel_already, ExpertParallel(), "module: got a GroupedSwiGLU that is parallel already"),
    "own forward": (2, programs.own_forward, TensorParallel(), "GroupedSwiGLU that .* has another forward"),
    "bias": (2, programs.biased, TensorParallel(), "down_proj: got a bias"),
    "main_grad": (2, programs.main_grad, ExpertParallel(), "accumulate_into_main_grad=True"),
    "pairs": (4, programs.pairs, TensorParallel(), "in pairs of 64"),
    "gather": (2, programs.uneven, ExpertParallel(exchange="all_gather"), "wanted 'all_to_all'"),
    "chunks": (2, programs.uneven, ExpertParallel(chunks=2), "chunks: got 2 for a GroupedSwiGLU, .* wanted 1"),
    "adapters": (2, programs.adapted, ExpertParallel(), "gate_up_proj: got adapters .'default'."),
    "parametrized": (2, programs.trained_in_4_bits, ExpertParallel(), "gate_proj: got a parametrized weight"),
    "subclass": (2, programs.own_linear, TensorParallel(), "up_proj: got a OwnLinear, whose forward would be lost"),
    "class": (2, programs.linear, ExpertParallel(), "module: got a Linear"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_ranks_communicate(run, case):
    count, build, style, message = REFUSED[case]
    outcomes = run(programs.refused, count, build, style)
    for outcome in outcomes[::2]:
        with pytest.raises(Exception, match=message):
            raise Exception(outcome)


def test_meshes_of_other_dimensions_are_refused(run):
    for of_three, of_two in run(programs.other_dimensions, ExpertParallel()):
        assert "device_mesh: got 3 dimensions, wanted one or two" in of_three
        assert "got two dimensions without names" in of_two
    for reasons in run(programs.other_dimensions, TensorParallel()):
        assert "got 3 dimensions, wanted one" in reasons[0]
        assert "got 2 dimensions, wanted one" in reasons[1]


def test_more_tokens_than_a_gather_has_room_for(run):
    assert all("at most capacity = 3 tokens" in outcome for outcome in run(programs.too_many, first=2))


def test_shallow_copies_are_refused(run):
    """They would compute with the modules of the original, also after they were given others."""
    for of_layer, of_linear in run(programs.shallow_copies, first=2):
        assert "got a shallow copy of a parallel Llama4MoE" in of_layer
        assert "got a shallow copy of a parallel Linear" in of_linear


def test_symmetric_memory_wants_gpus(run):
    assert all("wanted CUDA devices" in outcome for outcome in run(programs.no_gpu))


def test_the_gather_of_symmetric_memory_is_an_operator_of_graphs(monkeypatch):
    monkeypatch.setattr(exchange, "_start_symmetric", lambda x, ranks, group_name: x.repeat(ranks, 1))
    gather = torch.ops.thunder_moe.symmetric_all_gather
    torch.library.opcheck(gather.default, (torch.randn(3, 4), 2, "a group"))
    compiled = torch.compile(lambda x: gather(2 * x, 2, "a group"), fullgraph=True, backend="aot_eager")
    for rows in (3, 5):
        x = torch.randn(rows, 4)
        assert torch.equal(compiled(x), (2 * x).repeat(2, 1))


@pytest.mark.parametrize("collective", ["cpu_all_gather", "cpu_reduce_scatter"])
def test_collectives_of_cpus_are_operators(run, collective):
    assert run(programs.checked_collective, collective, first=2) == [True] * 2


def test_no_functional_gather_runs_on_cpus(run):
    """Two that end at once end the process, on every torch up to 2.15 (docs/distributed.md, "On CPUs")."""
    for names in run(programs.collectives_of_a_step, "gather, chunks", first=2):
        assert any("cpu_all_gather" in name for name in names)
        assert not any("_c10d_functional" in name and "all_gather" in name for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [1, pytest.param(20, marks=pytest.mark.exhaustive)])
def test_steps_with_gathers_under_way(run, seconds):
    assert min(run(programs.steps_with_gradients, 1_000_000, seconds)) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(exchange="pigeons"), "exchange: got 'pigeons', wanted one of"),
        (dict(exchange=dict), "exchange: got <class 'dict'>, wanted one of .* or a subclass of Exchange"),
        (dict(capacity=0), "capacity: got 0"),
        (dict(capacity=True), "capacity: got True"),
        (dict(chunks=0), "chunks: got 0"),
        (dict(load_steps=-1), "load_steps: got -1"),
        (dict(load_steps=None), "load_steps: got None"),
    ],
)
def test_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        ExpertParallel(**arguments)


def test_expert_load_wants_a_parallel_model():
    with pytest.raises(ValueError, match="model: got a GroupedSwiGLU without"):
        expert_load(GroupedSwiGLU(2, 16, 16))


def test_a_rank_that_dies_gives_the_others_an_error(ranks):
    processes = ranks(4)
    processes.start(programs.within, 4, programs.dies, "exact")
    for rank in range(3):  # within the timeout of collectives, or `result` fails
        assert processes.result(rank) != "nothing was raised"
