"""Thunder's operator nvf_cutlass::f16a_nvfp4weight_scaled_grouped_mm in compiled graphs: it runs on our kernels.
Called by pytest; judged by the oracle, with the dequantized weights.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F
from both_compilers import compile_by
from fast_cases import others_slow
from oracle import dequantize, relative_error
from thunder.dynamo import thunderfx
from torch import nn

from thunder_moe import moe_executor, nvfp4, refresh_, rewrite_report

BF16 = torch.bfloat16
E, H, INTERMEDIATE = 4, 128, 256
ENDS = [5, 5, 6, 11]  # an expert without rows, one with one row


@pytest.fixture(scope="module")  # torch forgets a function of torch.ops when it is registered again
def operator():
    """Thunder's operator, registered as its benchmark does, but for its eager code, which nothing here may run."""

    @torch.library.custom_op("nvf_cutlass::f16a_nvfp4weight_scaled_grouped_mm", mutates_args=())
    def run(
        activation: torch.Tensor,
        fp4_weight: torch.Tensor,
        weight_scaling_factor: torch.Tensor,
        weight_global_scale: torch.Tensor,
        offsets: torch.Tensor,
        blockscale_offsets: torch.Tensor,
        problem_sizes: torch.Tensor,
    ) -> torch.Tensor:
        raise AssertionError("Thunder's own code ran")

    @run.register_fake
    def _(activation, fp4_weight, *others):
        return activation.new_empty(activation.shape[0], fp4_weight.shape[2], dtype=BF16)

    yield
    run._lib._destroy()


class Linear(nn.Module):
    """Experts as Thunder keeps them: transposed codes, swizzled block scales, global scales that divide."""

    def __init__(self, n, k, seed):
        super().__init__()
        weight = torch.randn(E, n, k, generator=torch.Generator().manual_seed(seed)) * k**-0.5
        linear = nvfp4.quantize(weight)
        swizzled = linear.to_layout("swizzled_128x4")
        self.register_buffer("fp4_weight", swizzled.qdata.view(torch.float4_e2m1fn_x2).transpose(-1, -2))
        self.register_buffer("weight_scaling_factor", swizzled.scale)
        self.register_buffer("weight_global_scale", linear.global_scale.reciprocal())
        self.linear = linear

    @property
    def dequantized(self):
        return dequantize(self.linear.qdata, self.linear.scale, 1 / self.weight_global_scale)

    def forward(self, rows, starts, blocks, by_name=False):
        n, k = self.fp4_weight.size(2), self.fp4_weight.size(1) * 2
        sizes = torch.stack([starts, torch.full_like(starts, n), torch.full_like(starts, k)], 1)
        weight = self.fp4_weight, self.weight_scaling_factor, self.weight_global_scale
        if not by_name:
            return torch.ops.nvf_cutlass.f16a_nvfp4weight_scaled_grouped_mm(rows, *weight, starts, blocks, sizes)
        return torch.ops.nvf_cutlass.f16a_nvfp4weight_scaled_grouped_mm(
            rows, *weight, offsets=starts, problem_sizes=sizes, blockscale_offsets=blocks
        )


class SwiGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = Linear(INTERMEDIATE, H, 1), Linear(INTERMEDIATE, H, 2)
        self.down = Linear(H, INTERMEDIATE, 3)

    def forward(self, rows, starts, blocks):
        gate = self.gate(rows, starts, blocks)
        return self.down(F.silu(gate) * self.up(rows, starts, blocks, by_name=True), starts, blocks)


def inputs(ends=ENDS):
    rows = torch.randn(ends[-1], H, generator=torch.Generator().manual_seed(0)).to(BF16)
    starts = torch.tensor([0, *ends[:-1]], dtype=torch.int32)
    return rows, starts, torch.zeros_like(starts)


def expected(model, rows, ends=ENDS):
    out, begin = [], 0
    for expert, end in enumerate(ends):
        x = rows[begin:end].float()
        gate, up = (x @ linear.dequantized[expert].T for linear in (model.gate, model.up))
        out.append((F.silu(gate) * up) @ model.down.dequantized[expert].T)
        begin = end
    return torch.cat(out)


def compiled_by(compiler, model):
    return thunderfx(model, executors=[moe_executor]) if compiler == "thunderfx" else compile_by(compiler, model)


COMPILERS = [
    "thunder",
    "dynamo-eager",
    *others_slow(["thunderfx", *(f"dynamo-{i}" for i in ("aot_eager", "inductor", "thunder"))], exhaustive=True),
]


@pytest.mark.parametrize("compiler", COMPILERS)
@torch.no_grad()
def test_it_runs_on_our_kernels(operator, compiler):
    model = SwiGLU()
    rows, *others = inputs()
    compiled = compiled_by(compiler, model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of weights that are laid out again and again
        results = [compiled(rows, *others) for _ in range(4)]
    assert relative_error(results[0], expected(model, rows)) < 1e-2
    assert all(torch.equal(result, results[0]) for result in results)
    assert results[0].dtype == BF16
    entries = [(entry.gemm.weight, entry.decision, entry.reason) for entry in rewrite_report(compiled)]
    assert entries == [(f"{name}.fp4_weight", "nvfp4", "quantized beforehand") for name in ("gate", "up", "down")]


@pytest.mark.parametrize("compiler", ["dynamo-eager", *others_slow(["thunder"], exhaustive=True)])
@torch.no_grad()
def test_changed_weights_are_seen(operator, compiler):
    model = SwiGLU()
    rows, *others = inputs()
    compiled = compiled_by(compiler, model)
    before = compiled(rows, *others)
    model.down.weight_global_scale.mul_(0.5)
    torch.testing.assert_close(compiled(rows, *others), 2 * before, rtol=0, atol=0)
    model.down.weight_global_scale.data.mul_(2)  # without a trace
    refresh_(model)
    torch.testing.assert_close(compiled(rows, *others), before, rtol=0, atol=0)


@torch.no_grad()
def test_eager_calls_of_ours():
    linear = Linear(INTERMEDIATE, H, 1)
    rows, starts, blocks = inputs()
    weight = linear.fp4_weight, linear.weight_scaling_factor, linear.weight_global_scale
    sizes = torch.zeros(E, 3, dtype=torch.int32)
    out = torch.ops.thunder_moe.nvf_cutlass_scaled_grouped_mm(rows, *weight, starts, blocks, sizes)
    wanted = torch.cat([rows[a:b].float() @ w.T for a, b, w in zip([0, *ENDS], ENDS, linear.dequantized, strict=False)])
    assert relative_error(out, wanted) < 5e-3


BAD = {
    "a start too few": (dict(offsets=torch.zeros(E - 1, dtype=torch.int32)), r"offsets: .*shape \(4,\), the first"),
    "row ends": (dict(offsets=torch.tensor(ENDS, dtype=torch.int32)), r"offsets: got \[5, 5, 6, 11\], wanted"),
    "starts past the rows": (dict(offsets=torch.tensor([0, 1, 2, 12], dtype=torch.int32)), "offsets: got"),
    "int64": (dict(offsets=torch.zeros(E, dtype=torch.int64)), "offsets: .*int32"),
    "float32": (dict(activation=torch.zeros(11, H)), "activation: .*bfloat16"),
    "in_features": (dict(activation=torch.zeros(11, 2 * H, dtype=BF16)), "fp4_weight: .*by the activation"),
    "sizes": (dict(problem_sizes=torch.zeros(E, 2, dtype=torch.int32)), r"problem_sizes: .*wanted shape \(4, 3\)"),
    "blocks": (dict(blockscale_offsets=torch.zeros(E + 1, dtype=torch.int32)), r"blockscale_offsets: .*\(4,\)"),
    "scales": (
        dict(weight_scaling_factor=torch.zeros(E, 96, 8).to(torch.float8_e4m3fn)), "weight_scaling_factor: got .*96"
    ),
    "a global scale of 0": (dict(weight_global_scale=torch.zeros(E)), "weight_global_scale: got .*positive"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
@torch.no_grad()
def test_bad_arguments(case):
    changes, message = BAD[case]
    linear = Linear(INTERMEDIATE, H, 1)
    names = ["activation", "offsets", "blockscale_offsets"]
    given = dict(zip(names, inputs(), strict=True), problem_sizes=torch.zeros(E, 3, dtype=torch.int32))
    given |= dict(linear.named_buffers()) | changes
    with pytest.raises(ValueError, match=message):
        torch.ops.thunder_moe.nvf_cutlass_scaled_grouped_mm(**given)


@pytest.mark.filterwarnings("ignore:Error detected")  # anomaly mode says where
@pytest.mark.parametrize("compiler", [None, "thunder", "dynamo-aot_eager"])
def test_a_gradient_is_an_error_that_says_what_to_do(operator, compiler):
    def run(rows, *others):
        weight = linear.fp4_weight, linear.weight_scaling_factor, linear.weight_global_scale
        return operation(rows, *weight, *others, torch.zeros(E, 3, dtype=torch.int32))

    linear = Linear(INTERMEDIATE, H, 1)
    rows, *others = inputs()
    compiled = compiled_by(compiler, linear) if compiler else run
    operation = torch.ops.thunder_moe.nvf_cutlass_scaled_grouped_mm
    with pytest.raises(Exception, match="from_thunder"):
        compiled(rows.requires_grad_(), *others).sum().backward()
