"""The layouts of NVFP4 weights: round trips, and each order against the one that its kernels document.
Called by pytest; judged by loops over indices, by torchao, and by humming-kernels' own source where it is installed.
"""

import ctypes
import importlib.util
import itertools
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from thunder_moe import nvfp4_layouts
from thunder_moe.nvfp4 import LAYOUTS, NVFP4Weight, dequantize, quantize


def bits(scale: torch.Tensor) -> torch.Tensor:
    return scale.view(torch.uint8)


@pytest.mark.parametrize(("source", "target"), [*itertools.product(LAYOUTS, LAYOUTS)])
def test_every_conversion_is_exact(source, target):
    packed = quantize(torch.randn(2, 256, 96))
    converted = packed.to_layout(source).to_layout(target)
    assert converted.layout == target
    assert converted.shape == packed.shape
    assert torch.equal(dequantize(converted), dequantize(packed))
    for back, first in zip(converted.to_layout("linear").tensors(), packed.tensors(), strict=True):
        assert torch.equal(bits(back), bits(first))


@pytest.mark.parametrize(("n", "k"), [(128, 64), (1, 16), (130, 80), (256, 128), (100, 48)])
def test_swizzled_layout(n, k):
    packed = quantize(torch.randn(2, n, k))
    swizzled = packed.to_layout("swizzled_128x4")
    rows, columns = swizzled.scale.shape[1:]
    assert rows % 128 == 0
    assert columns % 4 == 0
    flat = bits(swizzled.scale).view(2, -1)
    for row, column in [(0, 0), (n - 1, k // 16 - 1), (n // 2, 0), (n // 3, k // 32)]:
        tile = (row // 128) * (columns // 4) + column // 4
        position = tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4
        assert torch.equal(flat[:, position], bits(packed.scale)[:, row, column])
    assert int(bits(swizzled.scale).ne(0).sum()) == int(bits(packed.scale).ne(0).sum())
    back = swizzled.to_layout("linear")
    assert torch.equal(bits(back.scale), bits(packed.scale))
    assert torch.equal(dequantize(swizzled), dequantize(packed))


def test_swizzled_layout_equals_torchao():
    from torchao.prototype.mx_formats.utils import to_blocked

    scale = quantize(torch.randn(1, 200, 160)).scale
    assert torch.equal(bits(nvfp4_layouts.swizzle_scale(scale)).flatten(), bits(to_blocked(scale[0])).flatten())


def code(qdata, expert, n, k):
    return int(qdata[expert, n, k // 2]) >> 4 * (k % 2) & 15


def test_humming_layout_by_index():
    """Its thread 4 * g + t of a warp and its word of 16 rows, as the comments of `to_humming` say."""
    packed = quantize(torch.randn(2, 128, 64))
    humming = packed.to_layout("humming")
    words = humming.qdata.view(torch.int32).view(2, 64 // 16, 128 // 64, 32, 4)  # [E, K/16, N/64, thread, 16 rows]
    scales = bits(humming.scale).view(2, 64 // 16, 128)
    for expert, k16, n64, g, t, rows in itertools.product(range(2), range(4), range(2), range(8), range(4), range(4)):
        word = int(words[expert, k16, n64, 4 * g + t, rows]) & 0xFFFFFFFF
        for odd, eight_rows, eight_k in itertools.product(range(2), range(2), range(2)):
            n, k = 64 * n64 + 16 * rows + 8 * eight_rows + g, 16 * k16 + 8 * eight_k + 2 * t + odd
            assert word >> 4 * (4 * odd + 2 * eight_rows + eight_k) & 15 == code(packed.qdata, expert, n, k)
            place = 64 * n64 + 8 * g + 2 * rows + eight_rows
            assert scales[expert, k16, place] == bits(packed.scale)[expert, n, k16]


def humming_folder() -> Path | None:
    spec = importlib.util.find_spec("humming")
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


@pytest.mark.skipif(humming_folder() is None, reason="humming-kernels is not installed")
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_humming_layout_is_what_its_own_kernel_writes(tmp_path):
    """Its CUDA source, run on this CPU by tests/kernels/cuda_emulator.h."""
    include = humming_folder() / "include"
    emulator = Path(__file__).parent / "kernels" / "cuda_emulator.h"
    (tmp_path / "humming" / "utils").mkdir(parents=True)
    (tmp_path / "humming" / "utils" / "all.cuh").write_text("""
#include <cassert>
#include <type_traits>
#define CUDA_INLINE inline
#define PRAGMA_UNROLL
#define CEIL_DIV(a, b) (((a) + (b) - 1) / (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
constexpr uint32_t static_next_power_of_2(uint32_t n) { uint32_t p = 1; while (p < n) p *= 2; return p; }
""")
    program = tmp_path / "repack.cpp"
    program.write_text(f"""
#include "{emulator}"
#include "{include}/humming/kernel/process.cuh"
extern "C" void run(const uint32_t* in, uint32_t* out, int experts, int n, int k) {{
  for (int z = 0; z < experts; ++z) for (int y = 0; y < (k + 63) / 64; ++y) launch(n / 64, 32, [&] {{
    weight_repack_nk<4, 16, true, false, false, false, 0, false, false>(in, out, nullptr, n, k, n, k, 3);
  }}, y, z);
}}
""")
    library = tmp_path / "repack.so"
    subprocess.run(
        ["c++", "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{tmp_path}", str(program), "-o", str(library)], check=True
    )
    packed = quantize(torch.randn(3, 128, 96))
    out = torch.zeros_like(packed.qdata)
    ctypes.CDLL(str(library)).run(*map(ctypes.c_void_p, (packed.qdata.data_ptr(), out.data_ptr())), *packed.shape)
    assert torch.equal(packed.to_layout("humming").qdata, out)


@pytest.mark.parametrize("shape", [(2, 64, 64), (2, 128, 48)])
def test_shapes_that_humming_cannot_take(shape):
    packed = quantize(torch.randn(shape))
    with pytest.raises(ValueError, match=r"layout: got 'humming' .* needs out_features a multiple of 128"):
        packed.to_layout("humming")
    with pytest.raises(ValueError, match="qdata: .* wanted out_features a multiple of 128 and in_features of 32"):
        NVFP4Weight(*packed.tensors(), layout="humming")


def test_unknown_layout():
    packed = quantize(torch.randn(1, 8, 16))
    with pytest.raises(ValueError, match="layout: got 'tiled', wanted one of"):
        packed.to_layout("tiled")
