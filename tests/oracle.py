"""The independent oracle: NVFP4 and MXFP8 decoding by arithmetic on the bits, and fp32 loops over experts and tokens.
Called by the tests; calls plain torch and nothing of the package, so that an error cannot be on both sides.
"""

import math

import torch
import torch.nn.functional as F

# Relative Frobenius error of a kernel against fp32 products with the dequantized weights.
KERNEL_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 2e-3}
# Relative Frobenius error of NVFP4 itself on normally distributed weights.
FORMAT_ERROR = 0.095
# The same of MXFP8: the roundings of E4M3 alone, to three bits behind the leading one.
MXFP8_FORMAT_ERROR = 0.0266


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative Frobenius error, in fp64."""
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).norm() / expected.norm().clamp_min(1e-300)).item()


def decode_e2m1(code: int) -> float:
    """The value of a 4-bit code: sign, 2 exponent bits (bias 1), 1 mantissa bit; exponent 0 is subnormal."""
    sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
    magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -magnitude if sign else magnitude


def decode_e4m3(bits: int) -> float:
    """The value of a float8_e4m3fn bit pattern: bias 7, exponent 0 subnormal, 0x7f and 0xff are NaN."""
    sign, exponent, mantissa = bits >> 7, (bits >> 3) & 15, bits & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    magnitude = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -magnitude if sign else magnitude


def dequantize(qdata: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """uint8 (E, N, K // 2), e4m3 (E, N, K // 16) linear, fp32 (E,) or (E, N) -> fp32 (E, N, K)."""
    values = torch.tensor([decode_e2m1(code) for code in range(16)])
    scales = torch.tensor([decode_e4m3(bits) for bits in range(256)])
    experts, n, half = qdata.shape
    codes = torch.empty(experts, n, 2 * half, dtype=torch.long)
    codes[..., 0::2] = qdata.long() & 15
    codes[..., 1::2] = qdata.long() >> 4
    row_scale = global_scale.reshape(experts, -1, 1).expand(experts, n, 1)
    factors = scales[scale.view(torch.uint8).long()] * row_scale
    return values[codes] * factors.repeat_interleave(16, -1)


def decode_e8m0(bits: int) -> float:
    """The value of a float8_e8m0fnu bit pattern, a power of two; 255 is NaN."""
    return float("nan") if bits == 255 else 2.0 ** (bits - 127)


def dequantize_mxfp8(qdata: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """e4m3 (E, N, K), e8m0 (E, N, K // 32) linear -> fp32 (E, N, K)."""
    values = torch.tensor([decode_e4m3(bits) for bits in range(256)], dtype=torch.float64)
    powers = torch.tensor([decode_e8m0(bits) for bits in range(256)], dtype=torch.float64)
    factors = powers[scale.view(torch.uint8).long()].repeat_interleave(32, -1)
    return (values[qdata.view(torch.uint8).long()] * factors).float()


def quantize_mxfp8(block: list[float]) -> tuple[list[int], int]:
    """32 floats -> their E4M3 bytes and the E8M0 byte, by trying: the least power of two whose multiple 448 holds all,
    then the nearest of all codes, at a tie the even one."""
    largest = max(map(abs, block))
    scale = next(byte for byte in range(255) if largest <= 448 * 2.0 ** (byte - 127))
    if scale == 0:
        return [128 if math.copysign(1.0, value) < 0 else 0 for value in block], 0
    codes = []
    for value in block:
        wanted = abs(value) / 2.0 ** (scale - 127)
        nearest = min(range(127), key=lambda code: (abs(decode_e4m3(code) - wanted), code & 1))
        codes.append(nearest | (128 if math.copysign(1.0, value) < 0 else 0))
    return codes, scale


def groups(offsets: torch.Tensor) -> list[tuple[int, int, int]]:
    """(expert, first row, end row) of each expert, from cumulative row ends."""
    ends = offsets.tolist()
    return [(expert, start, end) for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False))]


def grouped_mm(rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """fp32 loop over experts: (M, K), (E, N, K) -> (offsets[-1], N)."""
    parts = [rows[start:end].float() @ weight[expert].float().T for expert, start, end in groups(offsets)]
    return torch.cat(parts)


def grouped_swiglu(rows: torch.Tensor, gate_up: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """fp32: (M, K), (E, 2I, K) gate rows first -> (offsets[-1], I)."""
    gate, up = grouped_mm(rows, gate_up, offsets).chunk(2, -1)
    return F.silu(gate) * up


def llama4_moe(moe: torch.nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    """fp32 loop over tokens of a `Llama4MoE` with 16-bit (or fp32) weights: (B, S, H) -> (B, S, H)."""
    experts, out = moe.routed_experts, []
    for token in hidden_states.reshape(-1, hidden_states.shape[-1]):
        logits = (token.to(moe.router.weight.dtype) @ moe.router.weight.T).float()
        total = torch.zeros_like(token, dtype=torch.float32)
        for value, expert in zip(*logits.topk(moe.top_k), strict=True):
            x = token.float() * torch.sigmoid(value)
            gate, up = (getattr(experts, name).weight[expert].float() @ x for name in ("gate_proj", "up_proj"))
            total = total + experts.down_proj.weight[expert].float() @ (F.silu(gate) * up)
        if moe.shared_expert is not None:
            x, shared = token.float(), moe.shared_expert
            hidden = F.silu(shared.gate_proj.weight.float() @ x) * (shared.up_proj.weight.float() @ x)
            total = total + shared.down_proj.weight.float() @ hidden
        out.append(total)
    return torch.stack(out).reshape(hidden_states.shape)


def moe_experts(
    hidden_states, expert_ids, expert_weights, gate_up, down, gate_up_bias=None, down_bias=None,
    weight_on_input=False, alpha=1.0, limit=None, up_shift=0.0,
):  # fmt: skip
    """fp32 loop over tokens and their experts: (T, H), ids and weights (T, A), (E, 2I, H), (E, H, I) -> (T, H)."""
    out = []
    for token, ids, weights in zip(hidden_states.float(), expert_ids.tolist(), expert_weights.float(), strict=True):
        total = torch.zeros_like(token)
        for expert, weight in zip(ids, weights, strict=True):
            if not 0 <= expert < gate_up.shape[0]:
                continue
            y = gate_up[expert].float() @ (token * weight if weight_on_input else token)
            y = y if gate_up_bias is None else y + gate_up_bias[expert]
            gate, up = y.chunk(2)
            if limit is not None:
                gate, up = torch.clamp(gate, max=limit), torch.clamp(up, -limit, limit)
            result = down[expert].float() @ (gate * torch.sigmoid(alpha * gate) * (up + up_shift))
            result = result if down_bias is None else result + down_bias[expert]
            total = total + (result if weight_on_input else result * weight)
        out.append(total)
    return torch.stack(out) if out else hidden_states.float()


def router(
    logits, bias=None, *, top_k, score="softmax", normalize=True, epsilon=0.0, least_sum=0.0, scale=1.0,
    num_groups=1, top_groups=1, group_best=2, mask_to_zero=False,
):  # fmt: skip
    """Python loops, in fp64: logits (T, E) without NaN -> (scores (T, A), expert ids (T, A)); the lower index wins."""
    all_scores, all_ids = [], []
    for row in logits.double().tolist():
        largest = max(row)
        powers = [math.exp(value - largest) for value in row]
        scores = [power / sum(powers) for power in powers]
        if score == "sigmoid":
            scores = [1 / (1 + math.exp(-value)) for value in row]
        choice = scores if bias is None else [s + b for s, b in zip(scores, bias.double().tolist(), strict=True)]
        size = len(row) // num_groups
        groups = [choice[group * size : (group + 1) * size] for group in range(num_groups)]
        sums = [sum(sorted(group, reverse=True)[:group_best]) for group in groups]
        kept = sorted(range(num_groups), key=lambda group: (-sums[group], group))[:top_groups]
        masked = 0.0 if mask_to_zero else -math.inf
        choice = [value if expert // size in kept else masked for expert, value in enumerate(choice)]
        ids = sorted(range(len(row)), key=lambda expert: (-choice[expert], expert))[:top_k]
        chosen = [scores[expert] for expert in ids]
        divisor = max(sum(chosen) + epsilon, least_sum) if normalize else 1.0
        all_scores.append([scale * value / divisor for value in chosen])
        all_ids.append(ids)
    return torch.tensor(all_scores).reshape(-1, top_k), torch.tensor(all_ids).reshape(-1, top_k)


def trained_linear(x, weight, offsets, bias=None, bias_scale=None):
    """fp64 loop over experts: (M, K), (E, N, K), bias (E, N), bias_scale (M,) -> (M, N), zeros past the end."""
    out = torch.zeros(x.shape[0], weight.shape[1], dtype=torch.float64)
    for expert, start, end in groups(offsets):
        y = x[start:end].double() @ weight[expert].double().T
        if bias is not None:
            factor = 1 if bias_scale is None else bias_scale[start:end].double()[:, None]
            y = y + bias[expert].double() * factor
        out = torch.cat([out[:start], y, out[end:]])
    return out


def round_e4m3(values):
    """Numbers to the nearest E4M3 number, at a tie the even one, in fp64; beyond 464 NaN, as E4M3 has no Inf."""
    _, exponent = torch.frexp(values)  # of a mantissa in [0.5, 1)
    step = torch.ldexp(torch.ones_like(values), (exponent - 1).clamp_min(-6) - 3)
    return torch.where(values.abs() <= 464, (values / step).round() * step, torch.nan)


def round_to_recipe(values, recipe):
    """(..., K) rounded by an 8-bit recipe along K, in fp64; the definition is in docs/training.md."""
    wide = values.double()
    if recipe == "fp8":  # each step rounded to fp32
        scale = (wide.abs().amax(-1, keepdim=True).clamp_min(2.0**-100) * torch.tensor(1 / 448).double()).float()
        return round_e4m3((wide * (1 / scale.double()).float().double()).float().double()) * scale.double()
    blocks = F.pad(wide, (0, -wide.shape[-1] % 32)).unflatten(-1, (-1, 32))
    mantissa, exponent = torch.frexp(blocks.abs().amax(-1, keepdim=True) / 448)
    exponent = exponent - (mantissa == 0.5).int()
    scale = torch.ldexp(torch.ones_like(mantissa), exponent)
    rounded = torch.where(exponent <= -127, 0, round_e4m3(blocks / scale) * scale)
    return rounded.flatten(-2)[..., : values.shape[-1]]


class RecipeLinear(torch.autograd.Function):
    """`trained_linear` by an 8-bit recipe: each of the three products rounds its operands along what it sums over."""

    @staticmethod
    def forward(ctx, x, weight, offsets, recipe):
        ctx.save_for_backward(x, weight, offsets)
        ctx.recipe = recipe
        return trained_linear(round_to_recipe(x, recipe), round_to_recipe(weight, recipe), offsets)

    @staticmethod
    def backward(ctx, grad):
        x, weight, offsets = ctx.saved_tensors
        by_n = round_to_recipe(weight.mT, ctx.recipe)
        of_x = trained_linear(round_to_recipe(grad, ctx.recipe), by_n, offsets)
        of_weight = torch.zeros_like(weight, dtype=torch.float64)
        for expert, start, end in groups(offsets):
            if end > start:
                of_rows = round_to_recipe(grad[start:end].T, ctx.recipe)
                of_weight[expert] = of_rows @ round_to_recipe(x[start:end].T, ctx.recipe).T
        return of_x, of_weight, None, None


def scaled_swiglu(y, scales=None, interleave=None, alpha=1.0, limit=None, up_shift=0.0):
    """fp64, column by column: (M, 2I) -> (M, I)."""
    width = y.shape[-1] // 2
    size = width if interleave is None else interleave
    gates = [2 * size * (i // size) + i % size for i in range(width)]
    gate, up = y[..., gates].double(), y[..., [i + size for i in gates]].double()
    if limit is not None:
        gate, up = torch.clamp(gate, max=limit), torch.clamp(up, -limit, limit)
    out = gate * torch.sigmoid(alpha * gate) * (up + up_shift)
    return out if scales is None else out * scales.double()[..., None]


def trained_mlp(x, offsets, gate_up, down, gate_up_bias=None, down_bias=None, scales=None, **form):
    """fp64: (M, H), (E, 2I, H), (E, H, I), biases, scales (M,) -> (M, H), zeros past the last row end."""
    rows = scaled_swiglu(trained_linear(x, gate_up, offsets, gate_up_bias), None, **form)
    factor = torch.ones(x.shape[0]) if scales is None else scales
    unscaled = trained_linear(rows, down, offsets, down_bias)
    parts = [unscaled[start:end] * factor[start:end].double()[:, None] for _, start, end in groups(offsets)]
    live = torch.cat(parts)
    return torch.cat([live, unscaled[live.shape[0] :]])
