"""The configurations of the CUDA GEMMs that tests run in the emulator, which are in the fast set, and their operands.
Called by the tests beside it; calls tests/oracle.py.
"""

import torch
from oracle import dequantize

from thunder_moe.formats.nvfp4 import quantize
from thunder_moe.formats.weight import NVFP4Weight
from thunder_moe.kernels import chains
from thunder_moe.kernels.cuda import operands
from thunder_moe.kernels.cuda.chain import ChainBuilder
from thunder_moe.kernels.cuda.configs import GemmConfig
from thunder_moe.kernels.cuda.plan import plan_gemm
from thunder_moe.kernels.cuda.prepared import Weight, append_gemm, columns_of
from thunder_moe.kernels.specs import GemmSpec

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
SWIGLU_CONFIGS = {
    "split 4": GemmConfig("split", 1, 2, 2, 4, 2),
    "staged": GemmConfig("staged", 4, 2, 2, 1, 4),
    "wgmma": GemmConfig("wgmma", 8, 2, 1, 1, 3),
}
TILED_SWIGLU_CONFIGS = {name: config for name, config in TILED_CONFIGS.items() if config.row_blocks == 2}
# One of each kernel, and the one whose blocks share tiles: fast tests of all kinds share the builds of these few.
FAST = ("split 8", "staged", "wgmma", "tiled mma", "tiled mma, shared", "tiled wgmma, two blocks of rows")


def make(experts, n, k, halves=1):
    parts = [quantize(torch.randn(experts, n // halves, k) * (i + 1)) for i in range(halves)]
    weight = NVFP4Weight.concatenate(*parts)
    # Extremes of the format: zero and subnormal scales, and the largest.
    weight.scale.view(torch.uint8)[:, 0, 0] = torch.tensor([0, 1, 7, 126], dtype=torch.uint8)[:experts]
    return weight, dequantize(*weight.tensors())


def emulate_device(monkeypatch, multiprocessors, capability=(9, 0)):
    """Make the emulated device another one."""
    monkeypatch.setattr(operands, "_device_facts", lambda device: (multiprocessors, capability))
    chains.clear()


def gemm_with_scratch(rows, weight, offsets, config, row_slot=None, activation=None, fill=0.0, **more):
    """Return the result of a GEMM's chain that is given its scratch memory, and that memory afterwards, by kernel.

    Args:
        rows: (M, K), or tokens with row_slot.
        weight: in the layout of the configuration.
        offsets: row ends.
        config: of the GEMM.
        row_slot, activation: as in `GemmSpec`.
        fill: what float32 or 16-bit scratch memory holds before.
        more: options of `append_gemm`.
    """
    (experts, n, k), m = weight.shape, (rows if row_slot is None else row_slot).shape[0]
    top_k = None if row_slot is None else m // rows.shape[0]
    target = operands.target(rows.device)
    spec = GemmSpec(m, experts, n, k, rows.dtype, operands.weight_spec(weight), target, top_k, activation=activation)
    sizes = []

    class Builder(ChainBuilder):
        def scratch(self, size):
            sizes.append(size)
            return self.operand((size,), torch.uint8)

    chain = Builder(rows.device)
    x = chain.operand(rows.shape, rows.dtype)
    packed = Weight(*map(chain.like, weight.tensors()))
    ends = chain.operand(offsets.shape, torch.int32)
    slots = None if row_slot is None else chain.operand(row_slot.shape, torch.int32)
    out = chain.result((m, columns_of(spec)), rows.dtype)
    append_gemm(chain, spec, plan_gemm(spec, config), x, packed, ends, slots, out=out, **more)
    scratch = [torch.full((size // 2,), fill, dtype=rows.dtype).view(torch.uint8) for size in sizes]
    slots = () if row_slot is None else (row_slot,)
    return chain.build()(rows, *weight.tensors(), offsets, *slots, *scratch), scratch
