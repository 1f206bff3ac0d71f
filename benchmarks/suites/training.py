"""Times the kernels of training and whole expert blocks: forward, backward and gradients of weights, beside torch's.
Called by `python -m benchmarks training`; calls kernels.select, GroupedMLP, both compilers and benchmarks/harness.

    dgrad, wgrad   the gradients of an expert GEMM of bf16 rows, beside torch._grouped_mm(dy, w) and (dy.t(), x)
    main_grad      the weight's gradient added to a float32 tensor, beside torch's gradient and add_
    bias           the gradient of a bias (E, N), beside index_add_ of float32 rows; its share of the memory's bandwidth
    activation     SwiGLU times a scale per row and its backward, beside torch's operations; likewise
    step           forward and backward of GroupedMLP, beside three grouped_mm and torch's operations: time, peak memory
    recipes        the same step by each 8-bit recipe, in eager mode, beside GroupedMLP in 16 bits and, on SM90, beside
                   torchao's FP8 grouped GEMMs with inductor's SwiGLU; and 4 such steps, in which the gradients of
                   weights add up, also with weights that are rounded once for all 4
    checks         one CUDA graph of forward and backward under other routings, synchronization, bits of bias gradients

Bandwidth is measured by a kernel that reads and writes 1 GiB each, in the same run. "even": all experts have as many
rows; "zipf": the i-th most frequent expert has 1/i of the rows of the first.
"""

from __future__ import annotations

import argparse
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.harness.report import (
    comma_list,
    one_of,
    parser,
    plot_lines,
    positive,
    relative_error,
    save,
    table,
    timed,
)
from benchmarks.harness.shapes import MoEShape
from benchmarks.harness.timing import measure
from thunder_moe.activations import SWIGLU
from thunder_moe.kernels.recipes import RECIPES
from thunder_moe.kernels.select import training_kernels
from thunder_moe.progress import progress_bar

STEM = "training"
MODELS = {
    shape.name: shape
    for shape in (
        MoEShape("qwen3-30b-a3b", 2048, 768, 128, 8),
        MoEShape("mixtral-8x7b", 4096, 14336, 8, 2),
        MoEShape("gpt-oss-20b", 2880, 2880, 32, 4),
        MoEShape("deepseek-v3/ep8", 7168, 2048, 32, 1),  # one of eight ranks' experts
        MoEShape("small", 64, 32, 4, 2),  # for a CPU
    )
}
ROUTINGS = ("even", "zipf")
PARTS = ("dgrad", "wgrad", "main_grad", "bias", "activation", "step", "recipes", "checks")
KEYS = ("part", "model", "of", "rows", "routing")
TOLERANCE = 1e-2  # of bf16 results, beside torch's
MICROBATCHES = 4  # of the part "recipes"
OF_8_BITS = 0.1  # of 8-bit recipes, beside 16 bits: the format's error
Calls = dict[str, Callable[[], Any]]


def main(argv: Sequence[str]) -> list[dict[str, Any]]:
    """Runs the benchmark; prints tables, writes JSON and a plot.

    Args:
        argv: the arguments behind the subcommand.

    Returns:
        The rows of the JSON.

    Raises:
        RuntimeError: a result is wrong.
        SystemExit: bad arguments.
    """
    args = _arguments(argv)
    copy = _copy_bandwidth(args.device)
    rows: list[dict[str, Any]] = []
    checks: dict[str, Any] = {}
    parts = [part for part in args.parts if part != "checks"]
    cells = [
        (part, MODELS[name], count, routing)
        for part in parts
        for name in args.models
        for count in args.rows
        for routing in args.routings
    ]
    report = partial(save, STEM, args.device, rows, args.output, copy_bytes_per_second=copy, checks=checks)
    if "checks" in args.parts:
        checks.update({name: _checks(MODELS[name], args.rows[-1], args.device) for name in args.models})
    bar = progress_bar(cells, unit="cell")
    for index, (part, shape, count, routing) in enumerate(bar):
        bar.set_description(f"{part} {shape.name} {count} {routing}")
        offsets = routed(shape.num_experts, count, routing, args.device)
        for of, bytes_moved, baseline, calls, extra in CELLS[part](shape, count, offsets):
            timings = measure(calls, device=args.device, rounds=args.rounds, budget=args.budget, slow=args.slow)
            row = dict(zip(KEYS, (part, shape.name, of, count, routing), strict=True))
            row |= timed(timings, baseline) | extra
            if bytes_moved:
                row["bandwidth_share"] = {
                    name: bytes_moved / timing.median / copy for name, timing in timings.items() if name != baseline
                }
            rows.append(row)
        if index + 1 < len(cells) and cells[index + 1][0] != part:
            report()  # what there is, should the run be ended
    path = report()
    image = _plot(path, rows, args.device)
    for part in dict.fromkeys(row["part"] for row in rows):
        of_part = [row for row in rows if row["part"] == part]
        baselines = [name for name in of_part[0]["seconds"] if name not in of_part[0]["times_faster"]]
        print(table(of_part, KEYS, baselines[0]), end="\n\n")
        for row in of_part:
            for key in ("bandwidth_share", "peak_mib"):
                if key in row:
                    numbers = ", ".join(f"{name} {value:.2f}" for name, value in row[key].items())
                    print(" ".join(str(row[k]) for k in KEYS), f"{key}: {numbers}")
    print(checks, path, image, sep="\n")
    return rows


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    result = parser("training", __doc__ or "", shapes=False)
    result.add_argument("--models", type=comma_list(one_of(MODELS)), help=f"of: {', '.join(MODELS)}")
    result.add_argument("--rows", type=comma_list(positive), help="M (default: 1024, 8192 and 32768; on a CPU 64)")
    result.add_argument("--routings", type=comma_list(one_of(ROUTINGS)), default=[*ROUTINGS], help="even, zipf")
    result.add_argument("--parts", type=comma_list(one_of(PARTS)), default=[*PARTS], help=f"of: {', '.join(PARTS)}")
    args = result.parse_args(argv)
    cuda = args.device.type == "cuda"
    args.models = args.models or ([name for name in MODELS if name != "small"] if cuda else ["small"])
    args.rows = args.rows or ([1024, 8192, 32768] if cuda else [64])
    return args


def routed(experts: int, rows: int, routing: str, device: torch.device, seed: int = 0) -> Tensor:
    """Row ends, int32 (E,), of all rows."""
    share = torch.ones(experts)
    if routing == "zipf":
        share = 1 / torch.arange(1, experts + 1).float()
        share = share[torch.randperm(experts, generator=torch.Generator().manual_seed(seed))]
    ends = (share.cumsum(0) / share.sum() * rows).round().int()
    ends[-1] = rows
    return ends.to(device)


def _copy_bandwidth(device: torch.device) -> float:
    """Return the bytes per second, read and written, of a kernel that negates 1 GiB (a copy in a graph: 2.7 TB/s)."""
    source = torch.zeros(2**28 if device.type == "cuda" else 2**24, device=device)
    target = torch.empty_like(source)
    timing = measure({"copy": lambda: torch.neg(source, out=target)}, device=device, budget=0.5)["copy"]
    return 2 * source.nbytes / timing.median


def _random(*shape: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=device, dtype=dtype)


def _compare(what: str, got: Tensor, wanted: Tensor, tolerance: float = TOLERANCE) -> None:
    error = relative_error(got, wanted)
    if error > tolerance:
        raise RuntimeError(f"{what} is wrong: relative error {error:.2g}")


Cell = tuple[str, int, str, Calls, dict[str, Any]]  # of, bytes moved or 0, baseline, calls, more of the row


def _gemms(shape: MoEShape, rows: int, offsets: Tensor) -> Iterator[tuple[str, Tensor, Tensor, int, int]]:
    """Return (name, x (M, K), grad (M, N), N, K) of gate_up and down."""
    for which in ("gate_up", "down"):
        _, n, k = shape.gemm(which)
        yield which, _random(rows, k, device=offsets.device), _random(rows, n, device=offsets.device), n, k


def _dgrad(shape: MoEShape, rows: int, offsets: Tensor) -> Iterator[Cell]:
    for which, _, grad, n, k in _gemms(shape, rows, offsets):
        weight = _random(shape.num_experts, n, k, device=offsets.device)
        torchs = partial(torch._grouped_mm, grad, weight, offs=offsets)
        ours = partial(training_kernels(grad.device).dgrad, grad, weight, offsets)
        _compare("dgrad", ours(), torchs())
        yield which, 0, "torch", {"torch": torchs, "thunder_moe": ours}, {}


def _wgrad(shape: MoEShape, rows: int, offsets: Tensor) -> Iterator[Cell]:
    for which, x, grad, _, _ in _gemms(shape, rows, offsets):
        torchs = partial(torch._grouped_mm, grad.t(), x, offs=offsets)
        ours = partial(training_kernels(grad.device).wgrad, x, grad, offsets)
        _compare("wgrad", ours(), torchs())
        yield which, 0, "torch", {"torch": torchs, "thunder_moe": ours}, {}


def _main_grad(shape: MoEShape, rows: int, offsets: Tensor) -> Iterator[Cell]:
    for which, x, grad, n, k in _gemms(shape, rows, offsets):
        main_grad = torch.zeros(shape.num_experts, n, k, device=offsets.device)
        kernels = training_kernels(grad.device)

        def torchs(main_grad: Tensor = main_grad, x: Tensor = x, grad: Tensor = grad) -> None:
            main_grad.add_(torch._grouped_mm(grad.t(), x, offs=offsets))

        kernels.wgrad(x, grad, offsets, main_grad, True)
        _compare("wgrad into main_grad", main_grad, torch._grouped_mm(grad.t(), x, offs=offsets))
        add = partial(kernels.wgrad, x, grad, offsets, main_grad, True)
        write = partial(kernels.wgrad, x, grad, offsets, main_grad, False)
        calls: Calls = {"torch + add_": torchs, "add": add, "overwrite": write}
        yield which, 0, "torch + add_", calls, {}


def _bias(shape: MoEShape, rows: int, offsets: Tensor) -> Iterator[Cell]:
    of_row = torch.bucketize(torch.arange(rows, device=offsets.device), offsets, right=True)
    for which, _, grad, n, _ in _gemms(shape, rows, offsets):
        scale = torch.rand(rows, device=offsets.device)

        def torchs(grad: Tensor = grad, n: int = n) -> Tensor:
            return torch.zeros(shape.num_experts, n, device=grad.device).index_add_(0, of_row, grad.float())

        kernels = training_kernels(grad.device)
        calls: Calls = {
            "index_add_": torchs,
            "thunder_moe": partial(kernels.bias_grad, grad, offsets),
            "thunder_moe, scaled": partial(kernels.bias_grad, grad, offsets, scale),
        }
        _compare("the bias gradient", calls["thunder_moe"](), torchs())
        yield which, grad.nbytes + 4 * shape.num_experts * n, "index_add_", calls, {}


def _activation(shape: MoEShape, rows: int, offsets: Tensor) -> Iterator[Cell]:
    features, device = shape.intermediate_size, offsets.device
    y, grad = _random(rows, 2 * features, device=device), _random(rows, features, device=device)
    scales, kernels = torch.rand(rows, device=device), training_kernels(device)

    def torchs(y: Tensor = y, scales: Tensor = scales) -> Tensor:
        gate, up = y.chunk(2, -1)
        return F.silu(gate) * up * scales[:, None].to(y.dtype)

    leaf, leaf_scales = y.clone().requires_grad_(), scales.clone().requires_grad_()
    with torch.enable_grad():
        out = torchs(leaf, leaf_scales)

    def torchs_backward() -> Any:
        return torch.autograd.grad(out, (leaf, leaf_scales), grad, retain_graph=True)

    forward = partial(kernels.scaled_activation, y, scales, offsets, form=SWIGLU)
    backward = partial(kernels.scaled_activation_gradient, grad, y, scales, offsets, form=SWIGLU)
    _compare("the activation", forward(), torchs())
    for got, wanted in zip(backward(), torchs_backward(), strict=True):
        assert got is not None
        _compare("the activation's gradient", got, wanted)
    calls: Calls = {"torch": torchs, "thunder_moe": forward}
    for interleave in (1, 32):
        if features % interleave == 0:
            of = partial(forward, interleave=interleave)
            calls[f"thunder_moe, interleave {interleave}"] = of
    yield "forward", y.nbytes + grad.nbytes, "torch", calls, {}
    calls = {"torch": torchs_backward, "thunder_moe": backward}
    for interleave in (1, 32):
        if features % interleave == 0:
            of = partial(backward, interleave=interleave)
            calls[f"thunder_moe, interleave {interleave}"] = of
    yield "backward", 2 * y.nbytes + grad.nbytes, "torch", calls, {}


class ThreeGemms(nn.Module):
    """Computes the same block by torch's operations: three grouped GEMMs, silu, products."""

    def __init__(self, gate: Tensor, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Parameter(weight.detach().clone()) for weight in (gate, up, down))

    def forward(self, x: Tensor, offsets: Tensor, scales: Tensor) -> Tensor:
        gate, up = (F.grouped_mm(x, weight.transpose(1, 2), offs=offsets) for weight in (self.gate, self.up))
        hidden = F.silu(gate) * up * scales[:, None].to(gate.dtype)
        return F.grouped_mm(hidden, self.down.transpose(1, 2), offs=offsets)


def _blocks(shape: MoEShape, device: torch.device, **options: Any) -> tuple[nn.Module, ThreeGemms]:
    """GroupedMLP, and the block of torch's operations with the same weights."""
    from thunder_moe import GroupedMLP

    sizes = shape.num_experts, shape.hidden_size, shape.intermediate_size
    ours: Any = GroupedMLP(*sizes, dtype=torch.bfloat16, device=device, **options)
    gate, up = ours.gate_up_proj.weight.chunk(2, 1)
    return ours, ThreeGemms(gate, up, ours.down_proj.weight)


def _steps(
    model: Callable[..., Tensor],
    parameters: list[nn.Parameter],
    *inputs: Tensor,
    microbatches: int = 1,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> tuple[Tensor, Tensor]:
    """Forward and backward of each microbatch: the output, the gradient of x. `around` makes a context of all."""
    x, offsets, scales, grad = inputs
    for parameter in parameters:
        parameter.grad = None
    with around():
        for _ in range(microbatches):
            x.grad = scales.grad = None
            out = model(x, offsets, scales)
            torch.autograd.backward(out, grad)
    assert x.grad is not None
    return out, x.grad


def _step(shape: MoEShape, rows: int, offsets: Tensor) -> Iterator[Cell]:
    from thunder_moe import RewriteWarning, moe_executor, register

    import thunder  # isort: skip  (after moe_executor, which makes Thunder 0.2.6 import on torch 2.13)

    register("torch")  # the backend "thunder_moe"
    device = offsets.device
    inner = "inductor" if device.type == "cuda" else "aot_eager"
    ours, torchs = _blocks(shape, device)
    x = _random(rows, shape.hidden_size, device=device).requires_grad_()
    scales = torch.rand(rows, device=device).requires_grad_()
    grad = _random(rows, shape.hidden_size, device=device)
    options: dict[str, Any] = {"thunder_moe.inner": inner}
    models: dict[str, tuple[Callable[..., Tensor], nn.Module]] = {
        "torch eager": (torchs, torchs),
        "torch inductor": (torch.compile(torchs, fullgraph=True, backend=inner, dynamic=False), torchs),
        "eager": (ours, ours),
        "torch.compile": (
            torch.compile(ours, fullgraph=True, backend="thunder_moe", options=options, dynamic=False),
            ours,
        ),
        "thunder": (thunder.jit(ours, executors=[moe_executor, *thunder.get_default_executors()]), ours),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RewriteWarning)  # weights that train stay 16-bit, as intended
        calls, more = _checked(models, (x, offsets, scales, grad))
    yield "forward + backward", 0, "torch eager", calls, more
    torch._dynamo.reset()


class TorchaoGemms(nn.Module):
    """Computes the block of a GroupedMLP by torchao's FP8 grouped GEMMs, and SwiGLU by inductor."""

    def __init__(self, gate_up: nn.Parameter, down: nn.Parameter) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down
        self.activate = torch.compile(_scaled_swiglu, fullgraph=True, dynamic=False)

    def forward(self, x: Tensor, offsets: Tensor, scales: Tensor) -> Tensor:
        from torchao.prototype.moe_training import _to_fp8_rowwise_then_scaled_grouped_mm

        multiply = partial(_to_fp8_rowwise_then_scaled_grouped_mm, offs=offsets, pad_token_groups_for_grouped_mm=False)
        hidden = self.activate(multiply(x, self.gate_up.transpose(1, 2)), scales)
        out: Tensor = multiply(hidden, self.down.transpose(1, 2))
        return out


def _scaled_swiglu(gate_up: Tensor, scales: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, -1)
    return (F.silu(gate) * up * scales[:, None]).to(gate_up.dtype)


def _torchao_obstacle(offsets: Tensor) -> str | None:
    """Return why torchao's FP8 grouped GEMMs do not run for these row ends; None if they do."""
    if offsets.device.type != "cuda" or torch.cuda.get_device_capability(offsets.device) != (9, 0):
        return "they need a GPU of compute capability 9.0"
    if (
        importlib.util.find_spec("torchao") is None
        or importlib.util.find_spec("torchao.prototype.moe_training") is None
    ):
        return "torchao.prototype.moe_training is not installed"
    return "they need multiples of 16 rows per expert" if offsets.remainder(16).any() else None


def _recipes(shape: MoEShape, rows: int, offsets: Tensor) -> Iterator[Cell]:
    from thunder_moe import GroupedMLP, round_weights_once

    device = offsets.device
    x = _random(rows, shape.hidden_size, device=device).requires_grad_()
    scales = torch.rand(rows, device=device).requires_grad_()
    grad = _random(rows, shape.hidden_size, device=device)
    models: dict[str, tuple[Callable[..., Tensor], nn.Module]] = {}
    for recipe in (None, *RECIPES):
        sizes = shape.num_experts, shape.hidden_size, shape.intermediate_size
        block: Any = GroupedMLP(*sizes, dtype=torch.bfloat16, device=device, recipe=recipe)
        if models:
            first: Any = models["bf16"][1]
            block.gate_up_proj.weight, block.down_proj.weight = first.gate_up_proj.weight, first.down_proj.weight
        models[recipe or "bf16"] = block, block
    obstacle = _torchao_obstacle(offsets)
    if obstacle is None:
        torchaos = TorchaoGemms(block.gate_up_proj.weight, block.down_proj.weight)
        models["torchao fp8"] = torchaos, torchaos
    else:
        tqdm.write(f"torchao's FP8 grouped GEMMs are not timed: {obstacle}")
    calls, more = _checked(models, (x, offsets, scales, grad), OF_8_BITS)
    yield "forward + backward", 0, "bf16", calls, more
    around = {}
    for recipe in RECIPES:
        once = f"{recipe}, weights rounded once"
        models[once], around[once] = models[recipe], partial(round_weights_once, models[recipe][1])
    calls, more = _checked(models, (x, offsets, scales, grad), OF_8_BITS, MICROBATCHES, around)
    yield f"{MICROBATCHES} microbatches", 0, "bf16", calls, more


def _checked(
    models: dict[str, tuple[Callable[..., Tensor], nn.Module]],
    inputs: tuple[Tensor, ...],
    tolerance: float = TOLERANCE,
    microbatches: int = 1,
    around: Mapping[str, Callable[[], AbstractContextManager[None]]] = MappingProxyType({}),
) -> tuple[Calls, dict[str, Any]]:
    """Return the steps of models, whose results have been compared with the first one's, and peaks of memory on CUDA.

    Args:
        models: name -> a callable, and the module that holds its parameters.
        inputs: x (M, H), offsets, scales (M,), the output's gradient (M, H).
        microbatches: of each step.
        around: name -> makes the context of a model's step.
    """
    calls: Calls = {}
    peak: dict[str, float] = {}
    wanted = None
    for name, (run, module) in models.items():
        options: dict[str, Any] = dict(microbatches=microbatches, around=around.get(name, nullcontext))
        calls[name] = partial(_steps, run, [*module.parameters()], *inputs, **options)
        results = [result.detach().clone() for result in calls[name]()]
        wanted = wanted or results
        for what, got, expected in zip(("output", "gradient of x"), results, wanted, strict=True):
            _compare(f"the {what} of {name}", got, expected, tolerance)
        if inputs[0].is_cuda:
            calls[name]()
            for _, each in models.values():
                each.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            calls[name]()
            torch.cuda.synchronize()
            peak[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
    for _, each in models.values():
        each.zero_grad()
    return calls, {"peak_mib": peak} if peak else {}


def _checks(shape: MoEShape, rows: int, device: torch.device) -> dict[str, Any]:
    """Checks properties on a CUDA device; raises RuntimeError if one does not hold."""
    results: dict[str, Any] = {}
    kernels = training_kernels(device)
    offsets, grad = routed(shape.num_experts, rows, "zipf", device), _random(rows, shape.hidden_size, device=device)
    first = kernels.bias_grad(grad, offsets)
    if not all(torch.equal(kernels.bias_grad(grad, offsets), first) for _ in range(100)):
        raise RuntimeError(f"{shape.name}: bias gradients differ between runs")
    results["bias gradients are the same bits"] = "100 runs"
    if device.type != "cuda":
        return results
    ours, torchs = _blocks(shape, device, bias=True)
    x = _random(rows, shape.hidden_size, device=device).requires_grad_()
    scales = torch.rand(rows, device=device).requires_grad_()
    parameters = [*ours.parameters()]
    for bias in (parameter for parameter in parameters if parameter.ndim == 2):
        nn.init.zeros_(bias)  # torch's block has none
    step = partial(_steps, ours, parameters, x, offsets, scales, grad)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        step()
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    results["synchronizations"] = "none"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, grad_x = step()
    grads = [parameter.grad for parameter in parameters if parameter.ndim == 3]
    for seed, routing in enumerate(("zipf", "even", "zipf"), 1):
        offsets.copy_(routed(shape.num_experts, rows, routing, device, seed))
        graph.replay()
        captured = [tensor.clone() for tensor in (out, grad_x, *grads) if tensor is not None]
        wanted = _steps(torchs, [*torchs.parameters()], x.detach().requires_grad_(), offsets, scales.detach(), grad)
        of_gate, of_up, of_down = (parameter.grad for parameter in torchs.parameters())
        assert of_gate is not None
        assert of_up is not None
        expected = (*wanted, torch.cat([of_gate, of_up], 1), of_down)
        for got, each in zip(captured, expected, strict=True):
            assert each is not None
            _compare(f"{shape.name}: a replay of the graph under routing {routing} {seed}", got, each)
    results["one CUDA graph, other routings"] = "3 replays"
    return results


CELLS: dict[str, Callable[[MoEShape, int, Tensor], Iterator[Cell]]] = {
    "dgrad": _dgrad,
    "wgrad": _wgrad,
    "main_grad": _main_grad,
    "bias": _bias,
    "activation": _activation,
    "step": _step,
    "recipes": _recipes,
}


def _plot(path: Any, rows: list[dict[str, Any]], device: torch.device) -> Any:
    """Times faster than torch, a panel for each part and model."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        lines = panels.setdefault(f"{row['part']}, {row['model']}", {})
        for name, ratio in row["times_faster"].items():
            if "interleave" not in name and row["routing"] == "even":
                label = name if row["part"] == "step" else f"{row['of']}, {name}"
                lines.setdefault(label, []).append((row["rows"], ratio))
    return plot_lines(
        path.with_suffix(".png"), panels, x="rows", y="times faster than torch", reference=1.0,
        title=f"Training, {device.type}, even routing", log=False,
    )  # fmt: skip
