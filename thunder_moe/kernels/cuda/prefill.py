"""GEMMs with many rows per expert and weights in layout "linear" on SM90: each call converts the weights first.
Called by backend.py and operators.py beside it; calls linear.py.

The kernels of "linear" weights decode them again for each tile of rows. With many tiles it is faster to write the
weights once in a layout or a dtype whose kernels multiply faster. This needs memory for one more weight.
"""

from __future__ import annotations

from torch import Tensor

from thunder_moe.formats.layouts import LINEAR
from thunder_moe.kernels.cuda.chain import launched
from thunder_moe.kernels.cuda.linear import kernel_for, prepare_linear
from thunder_moe.kernels.specs import LinearSpec, Target

RETILE_FIRST, DEQUANTIZE_FIRST = "tiled_64x64", "16 bits"
# Up to so many rows per expert the kernels of "linear" weights are as fast. H200, us of the GEMM with these kernels,
# with the conversion, and with bf16 weights. MXFP8 to tiles, Qwen3-30B-A3B (1536, 2048): 64 rows 298, 377, 262; 128
# rows 443, 429, 373; 256 rows 750, 643, 444; 512 rows 1252, 894, 762. Mixtral (28672, 4096): 256 rows 1696, 1366, 1036;
# 2048 rows 10118, 6070, 5615. NVFP4 to tiles, Llama 4 Scout (16384, 5120): 128 rows 931, 1232, 1182; 256 rows 1793,
# 1772, 1552; 512 rows 3241, 2714, 2362. MXFP8 to 16 bits, 64 experts of (2048, 352): 96 rows 73, 83, 58; 192 rows 122,
# 108, 71; 768 rows 322, 230, 196.
_MOST_ROWS = {"nvfp4": 256, "mxfp8": 128}
# The same limit for a single weight, where the conversion costs relatively more. MXFP8, (5120, 2048): 256 rows 31, 27,
# 16; 512 rows 39, 43, 23; 2048 rows 127, 96, 62. (16384, 5120): 256 rows 115, 119, 66; 512 rows 220, 202, 119. NVFP4,
# (5120, 2048): 2048 rows 103, 121, 62; 8192 rows 387, 315, 231.
_MOST_ROWS_ALONE = {"nvfp4": 2048, "mxfp8": 256}


def strategy(
    layout: str, shape: tuple[int, int, int], format: str, rows: int, capability: tuple[int, int],
    batch_invariant: bool = False,
) -> str | None:  # fmt: skip
    """Return how the weight is converted before the GEMM: `RETILE_FIRST`, `DEQUANTIZE_FIRST`, or None if it is not.

    Args:
        layout: the weight's layout.
        shape: the weight's (E, N, K).
        format: the weight's number format, a key of `_MOST_ROWS`.
        rows: the number of rows of all experts together.
        capability: the device's compute capability.
        batch_invariant: True if the choice must not depend on the rows: then the weight is never converted.
    """
    experts, n, k = shape
    most = _MOST_ROWS[format] * experts if experts > 1 else _MOST_ROWS_ALONE[format]
    if layout != LINEAR or capability != (9, 0) or rows <= most or batch_invariant:
        return None
    if n % 64 == 0 and k % 64 == 0:
        return RETILE_FIRST
    # The kernel of a single weight takes no offsets; the kernel of 16-bit weights stores eight features at a time.
    return DEQUANTIZE_FIRST if experts > 1 and n % 8 == 0 else None


def multiply(rows: Tensor, weight: Tensor, offsets: Tensor, target: Target) -> Tensor:
    """Multiply 16-bit aligned rows (M, K) by a contiguous weight (E, N, K), with offsets (E,); return (M, N)."""
    experts, n, k = weight.shape
    kernel = kernel_for(rows.dtype, n, k, target.capability, 0)
    run = prepare_linear(LinearSpec(rows.shape[0], experts, n, k, rows.dtype, target), kernel)
    return launched(run, rows, weight, offsets)
