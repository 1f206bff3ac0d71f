"""The checker of the nvFuser route, row by row: which calls it takes, and what it says of those that it declines.
Called by pytest.
"""

import re

import pytest
import thunder.core.dtypes as dtypes
from nvfuser_session import set_gpu

from thunder_moe.compilers.thunder import nvfuser as route
from thunder_moe.compilers.thunder.symbols import nvfp4_grouped_mm, nvfp4_grouped_swiglu
from thunder_moe.ops.operator import OPERATORS

from thunder.core.devices import to_device  # isort: skip
from thunder.core.proxies import TensorProxy  # isort: skip
from thunder.core.trace import TraceCtx, tracectx  # isort: skip

pytest_plugins = "nvfuser_session"  # the fixtures implementation and fusions

ACTIVATION, WEIGHT, SCALE, GLOBAL, OFFSETS, PLACES, SIZES = range(7)
TAKEN = [
    ((64, 128), dtypes.bfloat16),
    ((4, 64, 256), dtypes.float4_e2m1fn_x2),
    ((4, 256, 8), dtypes.float8_e4m3fn),
    ((4,), dtypes.float32),
    ((4,), dtypes.int32),
]
OPTIONAL = [((4,), dtypes.int32), ((4, 3), dtypes.int32)]
SHAPES_OF_K_96 = {ACTIVATION: ((64, 96), None), WEIGHT: ((4, 48, 256), None), SCALE: ((4, 256, 6), None)}
SHAPES_OF_N_200 = {WEIGHT: ((4, 64, 200), None), SCALE: ((4, 256, 8), None)}
MANY = {
    WEIGHT: ((1025, 64, 256), None),
    SCALE: ((1025, 256, 8), None),
    GLOBAL: ((1025,), None),
    OFFSETS: ((1025,), None),
}


def call_of(changes=None, count=5, device="cuda:0"):
    """Return proxies for the arguments of a call, some with another shape or dtype (None: unchanged)."""
    arguments = []
    for place, (shape, dtype) in enumerate([*TAKEN, *OPTIONAL][:count]):
        new_shape, new_dtype = (changes or {}).get(place, (None, None))
        options = dict(shape=new_shape or shape, dtype=new_dtype or dtype, requires_grad=False)
        arguments.append(TensorProxy(device=to_device(device), **options))
    return arguments


@pytest.fixture
def tracing(fusions):
    with tracectx(TraceCtx()):
        yield


@pytest.mark.parametrize("count", [5, 6, 7])
def test_checker_takes(tracing, implementation, count):
    arguments = call_of(count=count)
    for given in (arguments, [*arguments, *[None] * (7 - count)]):
        assert route.refusal(nvfp4_grouped_mm, *given, layout=route.LAYOUT) is None
        bsym = nvfp4_grouped_mm.bind(*given, layout=route.LAYOUT, output=nvfp4_grouped_mm.meta(*given))
        assert implementation.ex.can_fuse(bsym)
    fp16 = call_of({ACTIVATION: (None, dtypes.float16)})
    assert route.refusal(nvfp4_grouped_swiglu, *fp16, layout=route.LAYOUT, activation_amax=3.0) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({ACTIVATION: (None, dtypes.float32)}, "activation is torch.float32, wanted"),
        ({ACTIVATION: ((2, 64, 128), None)}, "activation has 3 dims, wanted 2"),
        ({ACTIVATION: ((64, 192), None)}, r"activation has shape \(64, 192\), wanted \(64, 128\)"),
        ({ACTIVATION: ((0, 128), None)}, "there are no rows"),
        ({WEIGHT: (None, dtypes.uint8)}, "fp4_weight is torch.uint8, wanted torch.float4_e2m1fn_x2"),
        ({WEIGHT: ((64, 256), None)}, "fp4_weight has 2 dims, wanted 3"),
        ({SCALE: (None, dtypes.float32)}, "weight_scaling_factor is torch.float32"),
        ({SCALE: ((4, 256, 12), None)}, r"weight_scaling_factor has shape \(4, 256, 12\), wanted \(4, 256, 8\)"),
        ({SCALE: ((1024, 8), None)}, "weight_scaling_factor has 2 dims"),
        ({GLOBAL: ((4, 256), None)}, r"weight_global_scale has shape \(4, 256\), wanted \(4,\)"),
        ({GLOBAL: (None, dtypes.bfloat16)}, "weight_global_scale is torch.bfloat16"),
        ({OFFSETS: (None, dtypes.int64)}, "offsets is torch.int64, wanted torch.int32"),
        ({OFFSETS: ((5,), None)}, r"offsets has shape \(5,\), wanted \(4,\)"),
        ({PLACES: (None, dtypes.int64)}, "blockscale_offsets is torch.int64"),
        ({PLACES: ((5,), None)}, "blockscale_offsets has shape"),
        ({SIZES: (None, dtypes.int64)}, "problem_sizes is torch.int64"),
        ({SIZES: ((4, 2), None)}, r"problem_sizes has shape \(4, 2\), wanted \(4, 3\)"),
        (SHAPES_OF_K_96, "in_features 96 is not a multiple of 64"),
        (SHAPES_OF_N_200, "out_features 200 is not a multiple of 128"),
        (MANY, "1025 experts, at most 1024"),
    ],
)
def test_checker_declines(tracing, changes, reason):
    count = 7 if {PLACES, SIZES} & set(changes) else 5
    refusal = route.refusal(nvfp4_grouped_mm, *call_of(changes, count), layout=route.LAYOUT)
    assert refusal is not None
    assert re.match(reason, refusal), refusal


def test_checker_declines_layouts_and_devices(tracing, implementation, monkeypatch):
    assert "layout is 'linear'" in route.refusal(nvfp4_grouped_mm, *call_of())
    tiled = dict(layout="tiled_64x64")
    assert "layout is 'tiled_64x64', wanted" in route.refusal(nvfp4_grouped_mm, *call_of(), **tiled)
    bsym = nvfp4_grouped_mm.bind(*call_of(), **tiled, output=nvfp4_grouped_mm.meta(*call_of()))
    assert not implementation.ex.can_fuse(bsym)
    assert "is on" in route.refusal(nvfp4_grouped_mm, *call_of(device="cpu"), layout=route.LAYOUT)
    apart = [*call_of()[:4], call_of(device="cuda:1")[4]]
    assert route.refusal(nvfp4_grouped_mm, *apart, layout=route.LAYOUT).startswith("offsets is on")
    assert "fp4_weight is None" in route.refusal(nvfp4_grouped_mm, call_of()[0], *[None] * 4, layout=route.LAYOUT)
    for capability in ((8, 0), (9, 0), (10, 3), (11, 0), (12, 0)):
        set_gpu(monkeypatch, implementation, capability=capability)
        assert "compute capability" in route.refusal(nvfp4_grouped_mm, *call_of(), layout=route.LAYOUT)
    set_gpu(monkeypatch, implementation, version="0.2.35")
    assert "wanted 0.2.36 or newer" in route.refusal(nvfp4_grouped_mm, *call_of(), layout=route.LAYOUT)


def test_checker_declines_arguments_that_the_kernel_does_not_know(tracing):
    parameters = OPERATORS[nvfp4_grouped_swiglu.name].signature.parameters.values()
    extras = {parameter.name: parameter.default for parameter in parameters if parameter.name not in route.KNOWN}
    assert {"row_slot", "alpha"} <= extras.keys()
    for name, default in extras.items():
        assert route.refusal(nvfp4_grouped_swiglu, *call_of(), layout=route.LAYOUT, **{name: default}) is None
        refusal = route.refusal(nvfp4_grouped_swiglu, *call_of(), layout=route.LAYOUT, **{name: 0.75})
        assert refusal == f"its kernel has no {name}"
    assert route.refusal(nvfp4_grouped_swiglu, *call_of(), layout=route.LAYOUT, unheard_of=1) == (
        "its kernel has no unheard_of"
    )


def test_plain_calls_alone_are_laid_out_anew(tracing):
    assert route.is_plain(nvfp4_grouped_swiglu, *call_of(), layout="linear")
    assert route.is_plain(nvfp4_grouped_mm, *call_of(), None, None)
    assert not route.is_plain(nvfp4_grouped_mm, *call_of(), layout=route.LAYOUT)
    assert not route.is_plain(nvfp4_grouped_mm, *call_of(), layout="tiled_64x64")
    assert not route.is_plain(nvfp4_grouped_mm, *call_of(count=6))
    assert not route.is_plain(nvfp4_grouped_swiglu, *call_of(), alpha=1.702)
