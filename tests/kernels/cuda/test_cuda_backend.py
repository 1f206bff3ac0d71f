"""The CUDA kernels on a CPU: their own source run by cuda_emulator.h, judged by tests/oracle.py.
Called by pytest; the emulated launches replace kernels.cuda._launch, all else is the backend's own code.
"""

import json
import re

import pytest
import torch
from emulator.guarded_memory import guarded
from oracle import KERNEL_TOLERANCE, dequantize, grouped_mm, grouped_swiglu, moe_experts, relative_error

from thunder_moe.activations import GLU
from thunder_moe.formats import nvfp4
from thunder_moe.formats.nvfp4 import NVFP4Weight, quantize
from thunder_moe.kernels import reference
from thunder_moe.kernels.cuda import backend as cuda
from thunder_moe.kernels.cuda import configs as cuda_configs
from thunder_moe.kernels.cuda import workspace
from thunder_moe.kernels.cuda.configs import GemmConfig, Point, candidates, choose_config
from thunder_moe.routing import route as plain_route

DTYPES = [torch.bfloat16, torch.float16]
CONFIGS = {
    "split 8": GemmConfig("split", 1, 1, 1, 8, 4),
    "split 2": GemmConfig("split", 2, 1, 4, 2, 2),
    "two blocks of rows": GemmConfig("split", 1, 2, 2, 1, 2),
    "staged": GemmConfig("staged", 4, 2, 2, 1, 3),
    "staged, 64 tokens": GemmConfig("staged", 8, 1, 4, 1, 2),
    "wgmma": GemmConfig("wgmma", 8, 1, 2, 1, 3),
    "wgmma, two blocks of rows": GemmConfig("wgmma", 16, 2, 1, 1, 4),
    "wgmma, 192 tokens": GemmConfig("wgmma", 24, 1, 2, 1, 3),
}
TILED_CONFIGS = {
    "tiled mma": GemmConfig("tiled_mma", 1, 1, 1, 1, 1),
    "tiled mma, split 2": GemmConfig("tiled_mma", 1, 1, 1, 2, 2),
    "tiled mma, 16 tokens": GemmConfig("tiled_mma", 2, 1, 2, 2, 1),
    "tiled mma, 32 tokens": GemmConfig("tiled_mma", 4, 2, 1, 2, 2),
    "tiled mma, split 4": GemmConfig("tiled_mma", 1, 2, 1, 4, 1),
    "tiled mma, four blocks of rows": GemmConfig("tiled_mma", 1, 4, 1, 3, 1),
    "tiled mma, shared": GemmConfig("tiled_mma", 1, 2, 1, 2, 1, True),
    "tiled mma, shared, 16 tokens": GemmConfig("tiled_mma", 2, 1, 2, 1, 1, True),
    "tiled wgmma": GemmConfig("tiled_wgmma", 4, 1, 1, 1, 1),
    "tiled wgmma, odd": GemmConfig("tiled_wgmma", 9, 1, 2, 1, 1),
    "tiled wgmma, two blocks of rows": GemmConfig("tiled_wgmma", 2, 2, 1, 1, 1),
    "tiled wgmma, three warpgroups": GemmConfig("tiled_wgmma", 6, 2, 3, 1, 1),
    "tiled wgmma, 128 k": GemmConfig("tiled_wgmma", 7, 1, 4, 1, 2),
    "tiled wgmma, 256 k": GemmConfig("tiled_wgmma", 3, 2, 1, 1, 4),
}
# Tiles of an expert, stages of their K, and how many of the tiles seven blocks share.
SHARED_TILES = [
    (1, 15, 1), (2, 15, 2), (3, 15, 3), (4, 15, 0), (7, 15, 0), (8, 15, 8), (12, 15, 12), (14, 15, 0), (17, 15, 10),
    (1, 5, 1), (3, 2, 0), (8, 6, 8), (12, 6, 0),
]  # fmt: skip
SWIGLU_CONFIGS = {
    "split 4": GemmConfig("split", 1, 2, 2, 4, 2),
    "staged": GemmConfig("staged", 4, 2, 2, 1, 4),
    "wgmma": GemmConfig("wgmma", 8, 2, 1, 1, 3),
}
TILED_SWIGLU_CONFIGS = {name: config for name, config in TILED_CONFIGS.items() if config.row_blocks == 2}


@pytest.fixture
def hopper(emulated, monkeypatch):
    """The emulated device has compute capability 9.0."""
    monkeypatch.setattr(cuda, "_device_facts", lambda device: (3, (9, 0)))


@pytest.fixture(params=["linear", "tiled_64x64"])
def layout(request):
    """Of weights; on a device whose kernels read it."""
    request.getfixturevalue("emulated" if request.param == "linear" else "hopper")
    return request.param


def make(experts, n, k, halves=1):
    parts = [quantize(torch.randn(experts, n // halves, k) * (i + 1)) for i in range(halves)]
    weight = NVFP4Weight.concatenate(*parts)
    # Extremes of the format: zero and subnormal scales, and the largest.
    weight.scale.view(torch.uint8)[:, 0, 0] = torch.tensor([0, 1, 7, 126], dtype=torch.uint8)[:experts]
    return weight, dequantize(*weight.tensors())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [16, 48, 128, 656, 1280])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_grouped_mm(emulated, config, dtype, k):
    offsets = torch.tensor([3, 3, 40, 42], dtype=torch.int32)
    for n in (16, 88) if k != 48 else (33,):
        weight, exact = make(4, n, k)
        rows = torch.randn(44, k).to(dtype)
        out = cuda.grouped_mm(rows, weight, offsets, config=config)
        assert relative_error(out[:42], grouped_mm(rows, exact, offsets)) < KERNEL_TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [64, 320, 512])
@pytest.mark.parametrize("config", TILED_CONFIGS.values(), ids=TILED_CONFIGS.keys())
def test_grouped_mm_of_tiles(emulated, hopper, config, k, dtype):
    offsets = torch.tensor([3, 3, 40, 42], dtype=torch.int32)
    for n in (64, 192):
        weight, exact = make(4, n, k)
        rows = torch.randn(44, k).to(dtype)
        out = cuda.grouped_mm(rows, weight.to_layout("tiled_64x64"), offsets, config=config)
        assert relative_error(out[:42], grouped_mm(rows, exact, offsets)) < KERNEL_TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", TILED_SWIGLU_CONFIGS.values(), ids=TILED_SWIGLU_CONFIGS.keys())
def test_grouped_swiglu_of_tiles(emulated, hopper, config, dtype):
    """Tokens are gathered and scaled; gate and up have different global scales."""
    offsets = torch.tensor([3, 3, 40, 42], dtype=torch.int32)
    form = GLU(1.702, 1.5, 1.0)
    for n, k in ((64, 64), (192, 320)):
        weight, _ = make(4, 2 * n, k, halves=2)
        tokens, row_slot = torch.randn(21, k).to(dtype), torch.randperm(42).int()
        scale, bias = torch.rand(42), torch.randn(4, 2 * n)
        out = cuda.grouped_swiglu(
            tokens, weight.to_layout("tiled_64x64"), offsets, row_slot, scale, bias, form, config=config
        )
        expected = reference.grouped_swiglu(tokens.float(), weight, offsets, row_slot, scale, bias, form)
        assert relative_error(out, expected) < 2 * KERNEL_TOLERANCE[dtype]


def test_grouped_swiglu_where_a_block_has_rows_of_gate_and_up(emulated, hopper):
    offsets = torch.tensor([3, 3, 7, 9], dtype=torch.int32)
    weight, exact = make(4, 192, 64, halves=2)
    rows = torch.randn(9, 64, dtype=torch.bfloat16)
    out = cuda.grouped_swiglu(rows, weight.to_layout("tiled_64x64"), offsets)
    assert relative_error(out, grouped_swiglu(rows, exact, offsets)) < 1e-2


def test_tiles_need_their_device(emulated):
    weight, _ = make(4, 64, 64)
    rows, offsets = torch.randn(4, 64, dtype=torch.bfloat16), torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    with pytest.raises(
        ValueError, match=r"layout: 'tiled_64x64' is for devices of compute capability \(9, 0\).*\(8, 0\)"
    ):
        cuda.grouped_mm(rows, weight.to_layout("tiled_64x64"), offsets)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", SWIGLU_CONFIGS.values(), ids=SWIGLU_CONFIGS.keys())
def test_grouped_swiglu(emulated, config, dtype):
    offsets = torch.tensor([3, 3, 40, 42], dtype=torch.int32)
    for n, k in ((16, 128), (88, 272)):
        weight, exact = make(4, 2 * n, k, halves=2)
        rows = torch.randn(44, k).to(dtype)
        out = cuda.grouped_swiglu(rows, weight, offsets, config=config)
        assert relative_error(out[:42], grouped_swiglu(rows, exact, offsets)) < KERNEL_TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_row", [False, True])
def test_dequantize_bit_for_bit(emulated, dtype, per_row):
    weight, _ = make(4, 24, 80, halves=2 if per_row else 1)
    assert torch.equal(cuda.dequantize(weight, dtype), nvfp4.dequantize(weight, dtype))
    weight, _ = make(4, 128, 192, halves=2 if per_row else 1)
    tiled = weight.to_layout("tiled_64x64")
    assert torch.equal(cuda.dequantize(tiled, dtype), nvfp4.dequantize(weight, dtype))


def test_gradient(emulated, monkeypatch):
    monkeypatch.setattr(cuda, "_device_facts", lambda device: (3, (9, 0)))
    weight, exact = make(4, 24, 80)
    offsets = torch.tensor([3, 3, 7, 9], dtype=torch.int32)
    grad = torch.randn(9, 24, dtype=torch.bfloat16)
    out = cuda.grouped_mm_dgrad(grad, weight, offsets)
    assert relative_error(out, grouped_mm(grad, exact.transpose(1, 2), offsets)) < 5e-3


def test_every_routing_of_the_shared_table(offsets, layout):
    weight, exact = make(4, 32 if layout == "linear" else 64, 128)
    rows = torch.randn(int(offsets[-1]) + 1, 128, dtype=torch.bfloat16)
    out = cuda.grouped_mm(rows, weight.to_layout(layout), offsets)
    assert relative_error(out[: offsets[-1]], grouped_mm(rows, exact, offsets)) < 5e-3


@pytest.mark.parametrize("weight_on_input", [False, True])
@pytest.mark.parametrize("tokens", [1, 9, 70])
def test_a_whole_layer(layout, tokens, weight_on_input):
    experts, top_k, hidden, inner, dtype = 6, 2, 64, 48 if layout == "linear" else 64, torch.bfloat16
    gate_up, down = quantize(torch.randn(experts, 2 * inner, hidden)), quantize(torch.randn(experts, hidden, inner))
    linear = gate_up, down
    gate_up, down = gate_up.to_layout(layout), down.to_layout(layout)
    biases = torch.randn(experts, 2 * inner, dtype=dtype), torch.randn(experts, hidden)
    x, ids, scores = (
        torch.randn(tokens, hidden, dtype=dtype),
        torch.randint(-1, 7, (tokens, top_k)),
        torch.rand(tokens, top_k),
    )
    row_slot, offsets, slot_row = cuda.route(ids, experts)
    on_input, on_output = (scores, None) if weight_on_input else (None, scores)
    rows = cuda.grouped_swiglu(x, gate_up, offsets, row_slot, on_input, biases[0], GLU(1.702, 1.5, 1.0))
    out = cuda.grouped_mm_combine(rows, down, offsets, slot_row, on_output, biases[1])
    exact = [dequantize(*weight.tensors()) for weight in linear]
    form = dict(alpha=1.702, limit=1.5, up_shift=1.0)
    expected = moe_experts(x, ids, scores, *exact, *biases, weight_on_input=weight_on_input, **form)
    assert relative_error(out, expected) < 7e-3


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 1, 1), (1, 8, 128), (333, 3, 5), (2500, 4, 300)])
def test_route(emulated, tokens, top_k, experts, dtype):
    ids = torch.randint(-1, experts + 1, (tokens, top_k)).to(dtype)
    for actual, expected in zip(cuda.route(ids, experts), plain_route(ids, experts), strict=True):
        assert torch.equal(actual, expected)


def test_tokens_may_lie_unaligned_and_weights_be_shared_by_rows(layout):
    weight, exact = make(4, 32 if layout == "linear" else 64, 128)
    weight = weight.to_layout(layout)
    flat = torch.randn(5 * 128 + 1, dtype=torch.bfloat16)
    rows, offsets = flat[1:].view(5, 128), torch.tensor([1, 2, 4, 5], dtype=torch.int32)
    out = cuda.grouped_mm(rows, weight, offsets)
    assert relative_error(out, grouped_mm(rows, exact, offsets)) < 5e-3


@pytest.mark.parametrize("k", [16, 656])
@pytest.mark.parametrize("config", [*CONFIGS.values(), SWIGLU_CONFIGS["wgmma"]], ids=[*CONFIGS, "wgmma, swiglu"])
def test_reads_nothing_beyond_its_operands(emulated, monkeypatch, config, k):
    weight, exact = make(4, 88, k)
    weight = NVFP4Weight(*map(guarded, weight.tensors()))
    rows, offsets = guarded(torch.randn(42, k, dtype=torch.bfloat16)), torch.tensor([3, 3, 40, 42], dtype=torch.int32)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *shape: guarded(torch.empty(*shape, dtype=self.dtype)))
    kernel, oracle = (cuda.grouped_swiglu, grouped_swiglu) if config.row_blocks == 2 else (cuda.grouped_mm, grouped_mm)
    out = kernel(rows, weight, guarded(offsets), config=config)
    assert relative_error(out, oracle(rows, exact, offsets)) < 5e-3


@pytest.mark.parametrize("config", TILED_CONFIGS.values(), ids=TILED_CONFIGS.keys())
def test_reads_nothing_beyond_its_operands_and_tiles(emulated, hopper, monkeypatch, config):
    weight, exact = make(4, 192, 320)
    weight = weight.to_layout("tiled_64x64")
    weight = NVFP4Weight(*map(guarded, weight.tensors()), "tiled_64x64")
    rows, offsets = guarded(torch.randn(42, 320, dtype=torch.bfloat16)), torch.tensor([3, 3, 40, 42], dtype=torch.int32)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *shape: guarded(torch.empty(*shape, dtype=self.dtype)))
    out = cuda.grouped_mm(rows, weight, guarded(offsets), config=config)
    assert relative_error(out, grouped_mm(rows, exact, offsets)) < 5e-3


TIMED = ["split 8", "staged", "wgmma", "wgmma, two blocks of rows"]
TIMED_TILES = [
    "tiled mma, split 2",
    "tiled mma, split 4",
    "tiled mma, 16 tokens",
    "tiled wgmma, odd",
    "tiled wgmma, two blocks of rows",
    "tiled wgmma, 128 k",
]


@pytest.mark.parametrize("late_products", [0, 1])
@pytest.mark.parametrize("late_copies", [0, 1])
@pytest.mark.parametrize("order", [0, 1, 2, 3])
@pytest.mark.parametrize("name", [*TIMED, *TIMED_TILES])
def test_waits_and_barriers_hold_against_any_timing(
    emulated, hopper, adversary, monkeypatch, name, order, late_copies, late_products
):
    for field, value in dict(order=order, late_copies=late_copies, late_products=late_products).items():
        monkeypatch.setattr(adversary, field, value)
    # More stages than shared memory holds, so that each is used again.
    n, k, layout = (128, 1024, "tiled_64x64") if name in TIMED_TILES else (88, 656, "linear")
    weight, exact = make(4, n, k)
    rows, offsets = torch.randn(84, k, dtype=torch.bfloat16), torch.tensor([3, 3, 80, 84], dtype=torch.int32)
    out = cuda.grouped_mm(rows, weight.to_layout(layout), offsets, config=(CONFIGS | TILED_CONFIGS)[name])
    assert relative_error(out, grouped_mm(rows, exact, offsets)) < 5e-3


@pytest.mark.parametrize("config", [*CONFIGS.values(), *TILED_CONFIGS.values()], ids=[*CONFIGS, *TILED_CONFIGS])
def test_result_does_not_depend_on_the_number_of_blocks(emulated, hopper, monkeypatch, config):
    weight, _ = make(4, 160 if config.layout == "linear" else 192, 256)
    weight = weight.to_layout(config.layout)
    rows, offsets = torch.randn(40, 256, dtype=torch.bfloat16), torch.tensor([1, 20, 33, 40], dtype=torch.int32)
    first = cuda.grouped_mm(rows, weight, offsets, config=config)
    monkeypatch.setattr(cuda, "_device_facts", lambda device: (7, (9, 0)))
    assert torch.equal(cuda.grouped_mm(rows, weight, offsets, config=config), first)
    assert not workspace.semaphore_pool(rows.device).take().any()  # nothing that blocks have counted is left


@pytest.mark.parametrize(("tiles", "stages", "shared"), SHARED_TILES)
@pytest.mark.parametrize(
    "config", [GemmConfig("tiled_mma", 1, 1, 1, 1, 1, True), GemmConfig("tiled_mma", 2, 1, 2, 2, 2, True)]
)
def test_blocks_share_tiles(emulated, hopper, monkeypatch, config, tiles, stages, shared):
    """Few tiles, or those of the last round and one more, where it would leave blocks without work."""
    k, blocks, empty = stages * 64 * config.warps_k * config.depth, 7, torch.empty
    left = []

    def nans(*size, **how):
        left.append(empty(*size, **how).fill_(float("nan")))
        return left[-1]

    k -= 64 * (config.warps_k > 1)  # the last is not full
    weight, exact = make(1, tiles * config.tile_features(swiglu=False), k)
    weight, rows, offsets = weight.to_layout("tiled_64x64"), torch.randn(7, k).bfloat16(), torch.tensor([7]).int()
    monkeypatch.setattr(cuda, "_device_facts", lambda device: (blocks, (9, 0)))
    monkeypatch.setattr(torch, "empty", nans)
    out = cuda.grouped_mm(rows, weight, offsets, config=config)
    assert relative_error(out, grouped_mm(rows, exact, offsets)) < 5e-3
    assert not workspace.semaphore_pool(rows.device).take().any()
    pieces = 0 if shared == 0 else blocks if tiles > blocks else min(blocks // tiles, stages) * tiles
    # Who does not have the end of a tile leaves sums for who has.
    wanted = sum((block + 1) * shared * stages // pieces % stages > 0 for block in range(pieces))
    assert left[-1].view(blocks, -1).isfinite().any(1).sum() == wanted
    assert torch.equal(cuda.grouped_mm(rows, weight, offsets, config=config), out)


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("layout", cuda_configs.LAYOUTS)
def test_each_layout_was_measured(layout, swiglu):
    """What benchmarks/suites/tune.py has measured of one layout does not drive out what it has of another."""
    rows = [point.rows for point, _ in cuda_configs._measured((9, 0), swiglu, layout)]
    assert len(rows) >= 24
    assert min(rows) == 1
    assert max(rows) >= 512


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)])
def test_configurations_fit_the_device(capability):
    """Tiles of every configuration that can be chosen fit shared memory, and split K only as far as there is K."""
    available = (227 if capability == (9, 0) else 99) << 10  # 99: Ada and consumer Blackwell
    for rows in (1, 8, 64, 1000, 10_000, 262_144):
        for experts, features, k in ((1, 16, 16), (8, 28672, 4096), (128, 768, 2048), (512, 5120, 8192)):
            for swiglu in (False, True):
                live = min(rows, experts)
                point = Point(live, rows / live, features, k)
                layouts = cuda_configs.LAYOUTS if k % 64 == 0 and capability == (9, 0) else ("linear",)
                for layout in layouts:
                    found = candidates(point, swiglu, capability, layout)
                    chosen = choose_config(rows, experts, features, k, swiglu, 132, capability, layout)
                    for config in (chosen, *found):
                        assert config.layout == layout
                        assert config.kernel != "wgmma" or capability == (9, 0)
                        assert config.shared_bytes <= available
                        assert config.threads <= (512 if layout == "linear" else 640)
                        assert config.depth % 2 == 0 or config.kernel != "split"
                        assert config.row_blocks == 2 or not swiglu
                        if layout == "linear":
                            assert config.warps_k <= max(1, k // 128)
                        else:
                            assert config == config.fitted(k)
                            assert config.warps_k * 64 <= max(64, k)
                            assert config.stages >= 3


def test_a_configuration_is_fitted_to_k():
    mma, wgmma = GemmConfig("tiled_mma", 1, 1, 1, 4, 4, True), GemmConfig("tiled_wgmma", 6, 1, 4, 1, 4)
    assert mma.fitted(1 << 20) == mma
    assert mma.fitted((1 << 20) + 64) == GemmConfig("tiled_mma", 1, 1, 1, 4, 4, False)
    assert wgmma.fitted(512) == wgmma
    assert wgmma.fitted(384).depth == 2


def test_the_nearest_measured_point_decides(tmp_path, monkeypatch):
    file = tmp_path / "configs.json"
    few, many = ["split", 1, 1, 4, 2, 4], ["wgmma", 16, 2, 2, 1, 4]
    entries = [
        dict(capability=[9, 0], swiglu=False, point=[8, 1.0, 1536, 2048], config=few),
        dict(capability=[9, 0], swiglu=False, point=[128, 64.0, 1536, 2048], config=many),
        dict(capability=[9, 0], swiglu=True, point=[8, 1.0, 768, 2048], config=["split", 2, 2, 4, 2, 2]),
    ]
    file.write_text(json.dumps(dict(entries=entries)))
    monkeypatch.setattr(cuda_configs, "MEASURED", file)
    cuda_configs._measured.cache_clear()
    shape = dict(features=1536, k=2048, swiglu=False, multiprocessors=132, capability=(9, 0))
    assert choose_config(8, 128, **shape) == GemmConfig(*few)
    assert choose_config(128 * 40, 128, **shape) == GemmConfig(*many)
    assert choose_config(8 * 8, 8, **shape) == GemmConfig(*few)
    assert choose_config(8 * 9, 8, **shape) == GemmConfig(*many)  # nearer to `few`, which would take two tiles
    assert choose_config(8, 128, **{**shape, "k": 128}) == GemmConfig(*many)  # `few` has two warps along K
    assert choose_config(8, 128, **{**shape, "capability": (8, 0)}).kernel == "split"  # by rule
    cuda_configs._measured.cache_clear()


@pytest.mark.parametrize("file", sorted(cuda_configs.COMMON.parent.glob("*.cu")), ids=lambda file: file.stem)
def test_every_kernel_waits_for_the_one_before_it_first(file):
    bodies = re.split(r"__global__ void [^{;]*\{", file.read_text())[1:]
    assert bodies
    assert all(body.lstrip().startswith("await_previous_kernel();") for body in bodies)


def test_says_why_it_cannot_run():
    if torch.cuda.is_available():
        pytest.skip("it can run here")
    assert cuda.unavailable_reason() == "torch finds no CUDA device"


@pytest.mark.parametrize("config", TILED_CONFIGS.values(), ids=TILED_CONFIGS.keys())
def test_more_blocks_than_work(emulated, hopper, monkeypatch, config):
    """As many are launched as any routing may need; here one expert has all rows."""
    monkeypatch.setattr(cuda, "_device_facts", lambda device: (1000, (9, 0)))
    weight, exact = make(4, 192, 512)
    rows, offsets = torch.randn(40, 512, dtype=torch.bfloat16), torch.tensor([0, 40, 40, 40], dtype=torch.int32)
    out = cuda.grouped_mm(rows, weight.to_layout("tiled_64x64"), offsets, config=config)
    assert relative_error(out, grouped_mm(rows, exact, offsets)) < 5e-3
    assert not workspace.semaphore_pool(rows.device).take().any()
