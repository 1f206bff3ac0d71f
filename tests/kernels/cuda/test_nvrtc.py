"""NVRTC on a CPU: every kernel and every configuration that can be chosen compiles; structs, launches, the cache.
Called by pytest; nothing runs on a device. Machine code is cached between runs.
"""

import ctypes
import itertools
import os
import re
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from emulated_gemms import emulate_device
from fast_cases import covering, others_slow

from thunder_moe.kernels import code_cache
from thunder_moe.kernels.cuda import arguments as cuda_arguments
from thunder_moe.kernels.cuda import backend as cuda
from thunder_moe.kernels.cuda import configs as cuda_configs
from thunder_moe.kernels.cuda import (
    decode_attention,
    direct,
    linear,
    low_rank,
    nvrtc,
    prepared,
    recipes,
    router,
    training,
    wgrad,
)
from thunder_moe.kernels.cuda.configs import GemmConfig, Point

pytestmark = pytest.mark.skipif(nvrtc.missing_reason() is not None, reason=str(nvrtc.missing_reason()))

DTYPES = (torch.bfloat16, torch.float16)
CAPABILITIES = ((8, 0), (9, 0), (12, 0), (10, 0))
WGMMA, TILED_WGMMA = GemmConfig("wgmma", 8, 1, 2, 1, 3), GemmConfig("tiled_wgmma", 4, 1, 1, 1, 1)
OTHERS = {
    cuda_arguments.RouteArguments: (cuda.ROUTE, ["route_count", "route_scatter"]),
    cuda_arguments.RowStartsArguments: (cuda.ROUTE, ["row_starts"]),
    cuda_arguments.RouterArguments: (
        router.SOURCES,
        [
            *(
                f"{name}<{per_lane}, {by}, {threads}>"
                for per_lane, by, name, threads in (
                    (1, 0, "router_one_block", 1024),
                    (4, 0, "router_one_block", 512),
                    (5, 1, "router_choose", 512),
                    (8, 2, "router_one_block", 512),
                    (16, 0, "router_choose", 1024),
                    (16, 1, "router_one_block", 512),
                    (16, 2, "router_choose", 1024),
                )
            ),
            *(f"router_scatter<{per_lane}>" for per_lane in (1, 5, 16)),
        ],
    ),
    cuda_arguments.RouterLinearArguments: (
        router.SOURCES,
        [
            f"router_linear<{dtype}, {per_lane}, {by}, 256, {tokens}, {norm}>"
            for dtype, per_lane, by, tokens, norm in (
                ("true", 4, 0, 1, "true"),
                ("false", 1, 1, 2, "false"),
                ("true", 8, 2, 4, "false"),
                ("false", 16, 0, 3, "true"),
            )
        ],
    ),
    cuda_arguments.CombineArguments: (
        cuda.ROUTE,
        [f"combine<{dtype}, {slots}>" for dtype in ("true", "false") for slots in (1, 2, 4, 8)],
    ),
    cuda_arguments.SwigluArguments: (cuda._SWIGLU, ["swiglu<true>", "swiglu<false>"]),
    cuda_arguments.DequantizeArguments: (
        cuda.DEQUANTIZE,
        [
            f"dequantize{format}{layout}<{dtype}>"
            for format, layout, dtype in itertools.product(("", "_mxfp8"), ("", "_tiled"), ("true", "false"))
        ],
    ),
    cuda_arguments.ActivationArguments: (
        training.ACTIVATION,
        [
            *(f"activation_{way}<1, true, {pack}, 32>" for way in ("forward", "backward") for pack in (-1, 0, 1)),
            "activation_forward<0, false, 0, 256>",
            "activation_backward<2, true, 4, 256>",
        ],
    ),
    cuda_arguments.BiasArguments: (
        training.BIAS,
        [
            *(f"bias_grad_chunks<{dtype}, {vector}>" for dtype, vector in ((0, "true"), (1, "true"), (2, "false"))),
            "bias_grad_reduce",
            "bias_scale_grad<1, 0, true>",
            "add_bias<1, 1, true>",
            "add_bias<0, -1, false>",
            "zero_past_end<1>",
        ],
    ),
    cuda_arguments.RecipeArguments: (
        recipes.SOURCES,
        [
            *(f"quantize_rows<{dtype}, {mx}, false, 32>" for dtype in range(2) for mx in ("true", "false")),
            *(f"quantize_rows<1, false, true, {per_row}>" for per_row in (32, 256, 512)),
            *(f"quantize_columns<{dtype}, {mx}, false>" for dtype in range(2) for mx in ("true", "false")),
            "quantize_columns<1, false, true>",
        ],
    ),
    cuda_arguments.WgradArguments: (
        wgrad.MMA,
        ["wgrad_mma<true>", "wgrad_mma<false>", *(f"wgrad_any<{dtype}>" for dtype in range(3))],
    ),
    cuda_arguments.LinearArguments: (
        linear.MMA,
        [
            "linear_mma<true, false, 32>",
            "linear_mma<false, true, 128>",
            "linear_any<0, true, 128>",
            "linear_any<2, false, 32>",
            "linear_any<1, false, 64>",
        ],
    ),
    cuda_arguments.GatherLowRankArguments: (
        low_rank.GATHER,
        ["gather_low_rank<true, false, 1, 4>", "gather_low_rank<false, true, 4, 3>"],
    ),
    cuda_arguments.RankWgradArguments: (
        wgrad.RANK,
        [
            "rank_wgrad<true, true, 1, false, 4>",
            "rank_wgrad<true, false, 1, true, 4>",
            "rank_wgrad<false, false, 4, false, 3>",
        ],
    ),
    cuda_arguments.QuantizeArguments: (
        cuda._QUANTIZE,
        [
            *(f"largest_magnitude<{dtype}>" for dtype in range(3)),
            *(f"quantize<{dtype}, {search}>" for dtype in range(3) for search in ("false", "true")),
            *(f"convert_layout<{to_tiled}>" for to_tiled in ("false", "true")),
            *(f"quantize_mxfp8<{dtype}>" for dtype in range(3)),
            *(f"convert_layout_mxfp8<{to_tiled}>" for to_tiled in ("false", "true")),
        ],
    ),
}

BOOLS = "true", "false"
ATTENTION = (
    cuda_arguments.DecodeAttentionArguments,
    (
        decode_attention.SOURCES,
        [f"decode_attention<{numbers}>" for numbers in ("true, 64, 1, 1", "false, 64, 2, 16", "true, 128, 1, 8")],
    ),
)
OF_SM90 = [
    (cuda_arguments.DirectArguments, (direct.sources("nvfp4"), ["mm_tiled_direct<true, 4, 8, true>"])),
    (cuda_arguments.DirectArguments, (direct.sources("mxfp8"), ["mm_tiled_direct<false, 16, 4, false>"])),
    (cuda_arguments.GatherArguments, (WGMMA.sources, ["order_rows"])),
    (cuda_arguments.GatherArguments, (TILED_WGMMA.sources, ["gather_rows"])),
    (
        cuda_arguments.TmaWgradArguments,
        (
            wgrad.WGMMA,
            [f"wgrad_wgmma<{b}, {c}, {s}>" for b, (c, s) in itertools.product(BOOLS, wgrad._STAGES.items())],
        ),
    ),
    (
        cuda_arguments.ScaledWgradArguments,
        (wgrad.WGMMA, [f"scaled_wgrad_wgmma<{c}, {s}>" for c, s in wgrad._STAGES.items()]),
    ),
    *(
        (
            argument,
            (
                linear.WGMMA,
                [
                    f"{prefix}linear_wgmma<{BOOLS[index % 2]}, {transposed}, {tile}, {stages}>"
                    for index, (tile, stages) in enumerate(linear.STAGES.items())
                    for transposed in BOOLS
                ],
            ),
        )
        for prefix, argument in (
            ("", cuda_arguments.TmaLinearArguments),
            ("low_rank_", cuda_arguments.LowRankLinearArguments),
        )
    ),
    (
        cuda_arguments.ScaledLinearArguments,
        (linear.WGMMA, [f"scaled_linear_wgmma<{tile}, {stages}>" for tile, stages in linear.STAGES.items()]),
    ),
    (
        cuda_arguments.PackedLinearArguments,
        (
            linear.PACKED,
            [
                f"packed_linear_wgmma<{numbers}, {tile}, {stages}>"
                for tile, stages in linear.PACKED_STAGES.items()
                for numbers in ("true, false", "false, true")
            ],
        ),
    ),
    *(
        (
            cuda_arguments.LowRankGemmArguments,
            (sources, [f"low_rank_tiled_{name}<{b}, 24, 1, 3, 1, 7, {r}>" for b, r in (("true", 1), ("false", 4))]),
        )
        for name, sources in (("wgmma", TILED_WGMMA.sources), ("dgrad", (*TILED_WGMMA.sources, prepared.DGRAD)))
    ),
]
# Tables whose kernels a capability is the lowest to have, and those that a lower one has: PTX for that is valid here,
# and what the preprocessor adds is the same in all kernels of a table, or in its last one.
FIRST = {(8, 0): list(OTHERS.items()), (9, 0): [ATTENTION, *OF_SM90]}
AGAIN = {(9, 0): FIRST[8, 0], (12, 0): [*FIRST[8, 0], ATTENTION], (10, 0): [*FIRST[8, 0], ATTENTION]}


@pytest.fixture
def kept(monkeypatch, request):
    """Cache machine code apart from the user's, for the next run of the tests. Only runs of all tests optimize it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(code_cache.folder() / "tests"))
    if "not exhaustive" in request.config.option.markexpr or "not slow" in request.config.option.markexpr:
        monkeypatch.setattr(nvrtc, "_OPTIONS", (*nvrtc._OPTIONS, "--Ofast-compile=max"))


def compile_all(kernels):
    """Compile {(sources, expression, capability, argument)} side by side and check the results."""
    kernels = sorted(kernels, key=str)
    with ThreadPoolExecutor(min(4, len(os.sched_getaffinity(0)))) as pool:  # a host may have hundreds
        compiled = list(pool.map(lambda each: nvrtc.compile_files(*each), kernels))
    for (_, expression, *_), (cubin, name) in zip(kernels, compiled, strict=True):
        assert cubin.startswith(b"\x7fELF")
        assert expression.partition("<")[0] in name
    assert kernels


def gemm(config, dtype, swiglu, k, scaled, capability):
    return config.sources, config.expression(dtype, swiglu, k, scaled), capability, config.argument


GEMMS = ["split", "wgmma", "tiled_mma", "tiled_wgmma", "tiled_cluster"]


@pytest.mark.slow  # 25 s on one core, when nothing is cached
@pytest.mark.parametrize(
    ("strength", "kernel"),
    [*itertools.product([1], GEMMS), *others_slow(itertools.product([2], GEMMS), exhaustive=True)],
)
def test_measured_configurations_compile(kept, kernel, strength):
    """Compile enough of NVFP4's configurations to cover each of a kernel's template arguments, or each pair."""
    found = {
        gemm(config, torch.bfloat16, swiglu, point.k, False, (9, 0))
        for swiglu in (False, True)
        for layout in cuda_configs.LAYOUTS
        for point, config in cuda_configs._measured((9, 0), swiglu, layout)
        if config.kernel == kernel
    }
    found = sorted(found, key=str)
    numbers = [dict(enumerate(re.findall(r"\w+", expression.partition("<")[2]))) for _, expression, *_ in found]
    found = {found[position] for position in covering(numbers, strength)}
    for swiglu in (False, True):  # of MXFP8 a sample: the kernels are the same but for the decoding
        measured = cuda_configs._measured((9, 0), swiglu, "tiled_64x64", "mxfp8")[:: 18 // strength]
        found |= {gemm(c, torch.bfloat16, swiglu, at.k, False, (9, 0)) for at, c in measured if c.kernel == kernel}
    compile_all(found)


SIZES = [(12, False, 2112), (1, True, 2048), (24, True, 2112), (100, False, 2048)]


SOME_BY_RULE = [
    (*SIZES[position], capability, DTYPES[of : of + 1])
    for capability, positions in (((8, 0), (0, 2)), ((9, 0), (1, 3)), ((12, 0), (1, 3)))
    for of, position in enumerate(positions)
]
BY_RULE = [(*size, capability, DTYPES) for capability in CAPABILITIES for size in SIZES]


@pytest.mark.parametrize(
    ("rows", "swiglu", "k", "capability", "dtypes"),
    [(*SIZES[0], (9, 0), DTYPES), *others_slow(SOME_BY_RULE), *others_slow(BY_RULE, exhaustive=True)],
)
def test_configurations_by_rule_compile(kept, rows, swiglu, k, capability, dtypes):
    """They compile for both dtypes, K that is and is not a multiple of a chunk or stage, with and without a scale of
    rows."""
    found, point = set(), Point(1, rows, 768, k)
    configs = [cuda_configs._by_rule(point, swiglu, 132, capability)]
    if capability == (9, 0):
        configs.append(cuda_configs._by_rule_tiled(point).fitted(k))
        configs.insert(0, cuda_configs._few_rows_in_order(point, swiglu, 132, "nvfp4"))
    for config, dtype in itertools.product(configs, dtypes):
        found.add(gemm(config, dtype, swiglu, k, dtype == torch.float16, capability))
    of_mxfp8 = replace(configs[-1], format="mxfp8")
    found.add(gemm(of_mxfp8, DTYPES[swiglu], swiglu, k, swiglu, capability))
    compile_all(found)


def sample(expressions):
    """Return some of a table's kernels: together they have each name, and each value of each template argument."""
    numbers = [dict(enumerate(re.findall(r"[-\w]+", expression))) for expression in expressions]
    return [expressions[position] for position in sorted(covering(numbers, 1))]


@pytest.mark.slow  # 25 s on one core, when nothing is cached; the emulator's tests compile these sources as C++
@pytest.mark.parametrize(
    ("capability", "every"),
    [
        *itertools.product(CAPABILITIES[:3], [False]),
        *others_slow(itertools.product(CAPABILITIES, [True]), exhaustive=True),
    ],
)
def test_other_kernels_compile(kept, capability, every):
    first, again = FIRST.get(capability, []), AGAIN.get(capability, [])
    chosen = [
        *((table, expressions if every else sample(expressions)) for table in first for expressions in [table[1][1]]),
        *((table, expressions if every else expressions[-1:]) for table in again for expressions in [table[1][1]]),
    ]
    compile_all({(sources, name, capability, argument) for (argument, (sources, _)), names in chosen for name in names})


def test_every_kernel_and_struct_is_compiled_above():
    tables = [*FIRST[8, 0], *FIRST[9, 0]]
    others = {name.partition("<")[0] for _, (_, expressions) in tables for name in sample(expressions)}
    gemms = {"grouped_mm", "grouped_mm_staged", "grouped_mm_wgmma", "grouped_mm_tiled_mma", "grouped_mm_tiled_wgmma"}
    sources = "".join(file.read_text() for file in cuda_configs.COMMON.parent.glob("*.cu"))
    kernels = re.findall(r"__global__ void .*?(\w+)\(const", sources)
    assert sorted(kernels) == sorted(others | gemms | {"mm_tiled_cluster"})
    structs = {name for name in vars(cuda_arguments) if name.endswith("Arguments")}
    assert structs == {argument.__name__ for argument, _ in tables} | {"GemmArguments", "TmaGemmArguments"}


def static_shared_bytes(cubin, name):
    """Return the size of a kernel's section of static shared memory in the ELF file."""
    table, size, count, names = struct.unpack_from("<Q10xHHH", cubin, 40)
    headers = [struct.unpack_from("<II4Q", cubin, table + size * i) for i in range(count)]  # name, .., place, size
    start = headers[names][4]
    labels = [cubin[start + of : cubin.index(b"\0", start + of)].decode() for of, *_ in headers]
    return sum(of[5] for of, label in zip(headers, labels, strict=True) if label == f".nv.shared.{name}")


@pytest.mark.parametrize("rank", [40, 64])
def test_kernels_of_adapters_fit_shared_memory(kept, monkeypatch, rank):
    """Ada and consumer Blackwell have the least: 99 KiB, static shared memory included."""
    seen = []
    emulate_device(monkeypatch, 100, (8, 6))
    for module in (low_rank, wgrad):
        monkeypatch.setattr(module, "launch", lambda *args: seen.append(args))
    tokens, slots, ends = torch.zeros(4, 128).half(), torch.arange(8).int(), torch.tensor([8], dtype=torch.int32)
    low_rank.gather(tokens, slots, torch.zeros(1, rank, 128).half(), ends)
    wgrad.rank_wgrad(torch.zeros(8, rank).half(), tokens, ends, False, slots)
    assert len(seen) == 2
    for sources, expression, _, shared_bytes, _, argument, *_ in seen:
        cubin, name = nvrtc.compile_files(sources, expression, (8, 6), type(argument))
        static = static_shared_bytes(cubin, name)
        assert static > 8000  # where tiles and rows of 1,024 experts start
        assert shared_bytes + static <= 99 << 10


class CombineArguments(ctypes.Structure):
    """Two numbers have changed places."""

    _fields_ = tuple(
        (dict(tokens="top_k", top_k="tokens").get(name, name), kind)
        for name, kind in cuda_arguments.CombineArguments._fields_
    )


class RowStartsArguments(ctypes.Structure):
    """One number more."""

    _fields_ = (*cuda_arguments.RowStartsArguments._fields_, ("more_", ctypes.c_int))


@pytest.mark.parametrize(
    ("expression", "drifted", "message"),
    [
        ("combine<true, 2>", CombineArguments, "CombineArguments.top_k"),
        ("row_starts", RowStartsArguments, "the size of RowStartsArguments"),
    ],
)
def test_structs_that_differ_do_not_compile(kept, expression, drifted, message):
    with pytest.raises(RuntimeError, match=message):
        nvrtc.compile_files(cuda.ROUTE, expression, (8, 0), drifted)


def test_errors_name_the_kernel(kept):
    with pytest.raises(RuntimeError, match="nothing<1> for sm_80: .*nothing"):
        nvrtc.compile_files(cuda.ROUTE, "nothing<1>", (8, 0), cuda_arguments.RouteArguments)


def test_kernels_come_from_the_cache_and_without_one_are_compiled(tmp_path, monkeypatch):
    kernel, compiled = (cuda.ROUTE, "row_starts", (8, 0), cuda_arguments.RowStartsArguments), []
    compile_kernel = nvrtc._compile
    monkeypatch.setattr(nvrtc, "_compile", lambda *what: compiled.append(what) or compile_kernel(*what))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = nvrtc.compile_files(*kernel)
    assert nvrtc.compile_files(*kernel) == first
    assert len(compiled) == 1
    (file,) = (tmp_path / "thunder_moe").iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    assert nvrtc.compile_files(*kernel) == first
    assert len(compiled) == 2
    monkeypatch.setattr(code_cache, "_unwritable", set())
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    with pytest.warns(UserWarning, match="cannot be cached"):
        assert nvrtc.compile_files(*kernel) == first
    assert len(compiled) == 3


def test_launch_configuration():
    from cuda.bindings import driver

    config = nvrtc.launch_config(256, 1024, overlap=True)
    assert (config.gridDimY, config.gridDimZ) == (config.blockDimY, config.blockDimZ) == (1, 1)
    assert (config.blockDimX, config.sharedMemBytes) == (256, 1024)
    (attribute,) = config.attrs
    overlap = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert (attribute.id, attribute.value.programmaticStreamSerializationAllowed) == (overlap, 1)
    assert nvrtc.launch_config(256, 1024, overlap=False).numAttrs == 0


@pytest.mark.parametrize("has_one", [False, True])
def test_a_thread_without_a_context_gets_that_of_the_device(monkeypatch, has_one):
    from cuda.bindings import driver

    calls = []
    success = driver.CUresult.CUDA_SUCCESS
    monkeypatch.setattr(driver, "cuCtxGetCurrent", lambda: (success, 7 if has_one else 0))
    monkeypatch.setattr(driver, "cuDeviceGet", lambda ordinal: (success, f"device {ordinal}"))
    monkeypatch.setattr(driver, "cuDevicePrimaryCtxRetain", lambda device: (success, f"context of {device}"))
    monkeypatch.setattr(driver, "cuCtxSetCurrent", lambda context: calls.append(context) or (success,))
    monkeypatch.setattr(nvrtc, "_thread", threading.local())
    nvrtc.bind_context(3)
    nvrtc.bind_context(3)
    assert calls == ([] if has_one else ["context of device 3"])
