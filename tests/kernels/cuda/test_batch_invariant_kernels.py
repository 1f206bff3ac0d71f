"""The batch-invariant mode of the CUDA kernels, run by the emulator: a row has the same bits among any others.
Called by pytest; calls tests/batch_invariant_cases.py for the operators and their operands.
"""

import pytest
import torch
from batch_invariant_cases import CASES, Rows, differing
from emulated_gemms import CONFIGS, TILED_CONFIGS, make
from fast_cases import others_slow

from thunder_moe import batch_invariant
from thunder_moe.activations import SWIGLU
from thunder_moe.kernels.cuda import backend as cuda
from thunder_moe.kernels.cuda.configs import GemmConfig, invariant_parts, most_shared_bytes
from thunder_moe.kernels.cuda.plan import plan_gemm
from thunder_moe.kernels.specs import GemmSpec, Target, WeightSpec

ON_CUDA = [case for case in CASES if case != "training"]  # whose kernels the emulated device does not select
SHOWN = [("tiled_64x64", case) for case in ("dense", "router", "norm and router")]
LINEAR = [("linear", case) for case in ("experts", "grouped", "dense")]  # the others' kernels read no layout
OPERATORS = [
    *SHOWN,
    *others_slow(LINEAR + [("tiled_64x64", case) for case in ON_CUDA if ("tiled_64x64", case) not in SHOWN]),
    *others_slow((("linear", case) for case in ON_CUDA if ("linear", case) not in LINEAR), exhaustive=True),
]


@pytest.mark.parametrize(("layout", "case"), OPERATORS)
@torch.no_grad()
def test_rows_do_not_depend_on_others(chains, hopper, layout, case):
    rows = Rows(40, 512, 64, torch.float16, "nvfp4", layout)
    with batch_invariant():
        assert differing(rows, case, (7,)) == []


IN_ORDER = {
    "linear": [
        CONFIGS["staged"],
        CONFIGS["two blocks of rows"],
        CONFIGS["staged, 64 tokens"],
        GemmConfig("split", 1, 1, 4, 1, 2),
    ],
    "tiled_64x64": [config for config in TILED_CONFIGS.values() if config.kernel == "tiled_wgmma"],
}


@pytest.mark.parametrize("layout", others_slow(list(IN_ORDER), ["linear"]))
def test_configurations_that_add_in_order_give_the_same_bits(emulated, hopper, layout):
    weight, _ = make(4, 128, 512)
    weight, offsets = weight.to_layout(layout), torch.tensor([3, 3, 40, 42], dtype=torch.int32)
    rows = torch.randn(42, 512, dtype=torch.bfloat16)  # as most tests' kernels
    first, *others = (cuda.grouped_mm(rows, weight, offsets, config=config) for config in IN_ORDER[layout])
    assert all(config.parts_of_k == 1 for config in IN_ORDER[layout])
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.slow
def test_a_weight_alone_adds_as_groups_do(emulated, hopper):
    weight = make(1, 128, 512)[0].to_layout("tiled_64x64")
    rows, offsets = torch.randn(20, 512, dtype=torch.float16), torch.tensor([20], dtype=torch.int32)
    grouped = cuda.grouped_mm(rows, weight, offsets, config=GemmConfig("tiled_wgmma", 4, 1, 1, 1, 1))
    for config in (GemmConfig("tiled_cluster", 1, 1, 2, 1, 2), GemmConfig("tiled_cluster", 3, 1, 1, 1, 4)):
        assert config.parts_of_k == 1
        assert torch.equal(cuda.mm(rows, weight, config=config), grouped)


@pytest.mark.slow
def test_a_weight_with_two_parts_of_k(emulated, hopper):
    """Few features and large K: the two blocks of a cluster add a half each, for any number of rows."""
    weight, rows = make(1, 128, 1024)[0].to_layout("tiled_64x64"), torch.randn(70, 1024, dtype=torch.float16)
    with batch_invariant():
        whole = cuda.mm(rows, weight)
        for some in (slice(5, 6), slice(3, 36)):
            assert torch.equal(cuda.mm(rows[some], weight), whole[some])
        for numbers in ((3, 1, 2, 1, 2), (2, 1, 1, 1, 4)):
            config = GemmConfig("tiled_cluster", *numbers, splits=2)
            assert torch.equal(cuda.mm(rows, weight, config=config), whole)
    one_part = GemmConfig("tiled_cluster", 1, 1, 1, 1, 2)
    assert not torch.equal(cuda.mm(rows, weight, config=one_part), whole)


def test_a_configuration_of_another_order_is_refused(emulated, hopper):
    weight = make(1, 64, 512)[0].to_layout("tiled_64x64")
    rows, config = torch.randn(2, 512, dtype=torch.float16), GemmConfig("tiled_mma", 1, 1, 1, 2, 2)
    with batch_invariant(), pytest.raises(ValueError, match="config: got .*wanted parts_of_k = 1"):
        cuda.mm(rows, weight, config=config)


@pytest.mark.parametrize("layout", ["linear", "tiled_64x64"])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_chosen_configurations_add_in_order(layout, capability, format):
    if layout != "linear" and capability != (9, 0):
        pytest.skip("the layout is of compute capability 9.0")
    target = Target(torch.device("cuda", 0), 132, capability)
    dense = [(1, n, k) for n in (64, 192, 2048, 4224, 4288, 16384) for k in (64, 1024, 1152, 1280, 2048, 5120, 14336)]
    shapes = (*dense, (8, 28672, 4096), (128, 768, 2048), (16, 5120, 8192))
    for experts, n, k in shapes:
        for activation in (None, SWIGLU):
            for rows in (1, 2, 8, 33, 128, 700, 4096, 65536):
                spec = GemmSpec(
                    rows, experts, n, k, torch.bfloat16, WeightSpec(layout, format), target, activation=activation,
                    batch_invariant=True,
                )  # fmt: skip
                config = plan_gemm(spec).config
                assert config.parts_of_k == invariant_parts(spec)
                assert config.kernel != "tiled_cluster" or k % (64 * config.depth * config.splits) == 0
                assert config == config.fitted(k)
                if config.kernel == "tiled_cluster":  # for more sums ptxas serializes the products
                    assert config.token_blocks * config.warps_n <= 48
                assert config.layout == layout
                assert config.serves(experts, k)
                assert config.row_blocks == 2 or activation is None
                assert config.shared_bytes <= most_shared_bytes(capability)
                assert layout == "linear" or config.stages >= (2 if config.kernel == "tiled_cluster" else 3)
