"""Trains a byte-level language model of Llama4MoE blocks, compares it in bf16, NVFP4 and MXFP8: quality, memory, speed.
Called by `make demo` (`python examples/llama4_moe_text.py --help` for the options) and by tests/test_examples.py.
Calls thunder_moe (Llama4MoE, moe_executor, quantize_, rewrite_report), Thunder, torch.compile, matplotlib.

read the standard library's sources -> split by file -> train under Thunder -> freeze -> compile again: NVFP4 -> compare
-> generate text -> table, plot and JSON. The text is the running Python's library, so numbers differ by version.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import random
import statistics
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    from matplotlib.figure import Figure

    from thunder_moe import (
        GroupedMLP,
        Llama4MoE,
        Llama4MoEConfig,
        RewriteWarning,
        moe_executor,
        quantize_,
        register,
        rewrite_report,
    )
    from thunder_moe.nn import GroupedLinear, NVFP4GroupedLinear
    from thunder_moe.progress import progress_bar

    import thunder  # isort: skip  (after moe_executor, which makes Thunder 0.2.6 import on torch 2.13)
except ImportError as error:
    raise ImportError(f"this example needs pip install 'thunder_moe[bench]': {error}") from error

WINDOW = 128  # bytes of context
NEAR = 4  # bytes whose embeddings are added up at each position
BATCH = 16
EXPERTS = 8
HELD_OUT_BATCHES = 32
HELD_OUT_BYTES = HELD_OUT_BATCHES * BATCH * WINDOW  # 65,536
# Not read: tests, character tables, installed packages; nor _sysconfigdata, which differs between machines.
SKIPPED_DIRECTORIES = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages"}
COLUMNS = {
    "eager_bf16": "eager bf16",
    "thunder_bf16": "Thunder bf16",
    "thunder_nvfp4": "Thunder NVFP4",
    "compile_nvfp4": "torch.compile NVFP4",
    "thunder_nvfp4_quantize_": "quantize_ + Thunder",
    "thunder_mxfp8_quantize_": "the same in MXFP8",
}


# ---- text


def source_files(root: Path) -> list[Path]:
    """Return the .py files below a directory, sorted, without `SKIPPED_DIRECTORIES`."""
    files = (path for path in root.rglob("*.py") if not path.name.startswith("_sysconfigdata"))
    kept = [path for path in files if not SKIPPED_DIRECTORIES.intersection(path.relative_to(root).parts)]
    return sorted(kept, key=lambda path: path.relative_to(root).as_posix())


def split_files(files: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Return (train, held out): every 16th file is held out."""
    train = [path for index, path in enumerate(files) if index % 16 != 8]
    return train, [path for index, path in enumerate(files) if index % 16 == 8]


def read_bytes(files: Iterable[Path]) -> Tensor:
    """Return all files in one uint8 tensor, separated by a zero byte."""
    return torch.frombuffer(bytearray(b"\0".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def windows(text: Tensor, starts: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (bytes, the byte after each), both (len(starts), WINDOW) int64."""
    chunk = text[starts[:, None] + torch.arange(WINDOW + 1)].long().to(device)
    return chunk[:, :-1].contiguous(), chunk[:, 1:].contiguous()


# ---- model


class Block(nn.Module):
    """Causal attention and a `Llama4MoE`, each preceded by an RMSNorm."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = hidden // (32 if hidden % 32 == 0 else 16)
        self.attention_norm, self.moe_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.moe = Llama4MoE(Llama4MoEConfig(hidden, 2 * hidden, EXPERTS, num_shared_experts=1, top_k=1))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        qkv = self.qkv(self.attention_norm(x)).reshape(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, hidden))
        out: Tensor = x + self.moe(self.moe_norm(x))
        return out


class ByteModel(nn.Module):
    """Bytes (B, WINDOW) -> logits of the next byte (B, WINDOW, 256), float32."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(NEAR * 256, hidden), nn.Embedding(WINDOW, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, 256, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.3)
        nn.init.normal_(self.positions.weight, std=0.1)

    def forward(self, text: Tensor) -> Tensor:
        near = [F.pad(text, (k, 0))[:, :WINDOW] + 256 * k for k in range(NEAR)]  # each byte and the NEAR - 1 before it
        x = self.embedding(torch.stack(near, -1)).sum(-2) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits.float()


def with_grouped_mlp(model: ByteModel) -> ByteModel:
    """Return the model with a `GroupedMLP` of the same weights in the place of each `GroupedSwiGLU`."""
    blocks: Any = model.blocks
    for block in blocks:
        experts = block.moe.routed_experts
        gate, up, down = (linear.weight.detach() for linear in (experts.gate_proj, experts.up_proj, experts.down_proj))
        mlp = GroupedMLP(*down.shape, dtype=gate.dtype, device=gate.device)
        mlp.load_state_dict({"gate_up_proj.weight": torch.cat([gate, up], 1), "down_proj.weight": down})
        block.moe.routed_experts = mlp
    return model


# ---- training


class MasterAdamW:
    """AdamW on float32 copies of bf16 parameters: small updates would be rounded away in bf16."""

    def __init__(self, parameters: Iterable[nn.Parameter], steps: int, peak_rate: float) -> None:
        self.parameters = list(parameters)
        self.masters = [p.detach().float() for p in self.parameters]
        self.adamw = torch.optim.AdamW(self.masters, peak_rate, betas=(0.9, 0.95), weight_decay=0.05, fused=True)
        warmup = max(1, min(50, steps // 10))

        def rate(step: int) -> float:  # a ramp, then a cosine down to a twentieth of the peak
            return min((step + 1) / warmup, 0.525 + 0.475 * math.cos(math.pi * step / steps))

        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.adamw, rate)

    @torch.no_grad()
    def step(self) -> None:
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.adamw.step()
        self.schedule.step()
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            parameter.copy_(master)


def train(
    compiled: Callable[[Tensor], Tensor], model: ByteModel, text: Tensor, args: argparse.Namespace
) -> list[float]:
    """Trains all parameters through Thunder; returns the loss of each step in bits per byte."""
    generator = torch.Generator().manual_seed(args.seed)
    optimizer = MasterAdamW(model.parameters(), args.steps, peak_rate=5e-3)
    losses: list[float] = []
    bar = progress_bar(range(args.steps), desc="training", unit="step")
    # The executor leaves experts that train in 16 bits and warns that nothing was rewritten, as intended here.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RewriteWarning)
        for _ in bar:
            starts = torch.randint(len(text) - WINDOW, (BATCH,), generator=generator)
            inputs, targets = windows(text, starts, args.device)
            loss = F.cross_entropy(compiled(inputs).flatten(0, 1), targets.flatten())
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(loss.item() / math.log(2))
            bar.set_postfix(bits_per_byte=f"{statistics.fmean(losses[-20:]):.3f}")
    return losses


# ---- comparison


def held_out_batches(text: Tensor, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Return `HELD_OUT_BATCHES` batches of windows at equal distances in the held-out text."""
    starts = torch.linspace(0, len(text) - WINDOW - 1, HELD_OUT_BATCHES * BATCH, dtype=torch.float64).long()
    return [windows(text, part, device) for part in torch.split(starts, BATCH)]


def compare(
    columns: dict[str, Callable[[Tensor], Tensor]], batches: list[tuple[Tensor, Tensor]]
) -> dict[str, dict[str, float]]:
    """Held-out bits per byte and median tokens per second; all columns run on each batch in turn."""
    nats: dict[str, list[float]] = {name: [] for name in columns}
    seconds: dict[str, list[float]] = {name: [] for name in columns}
    shuffle = random.Random(0)
    synchronize: Callable[[], None] = torch.cuda.synchronize if batches[0][0].is_cuda else lambda: None
    for function in columns.values():
        function(batches[0][0])  # compiles
    for inputs, targets in progress_bar(batches, desc="comparing", unit="batch"):
        # In a new order each time, because each column finds the caches as the previous one left them.
        for name in shuffle.sample(list(columns), len(columns)):
            synchronize()
            start = time.perf_counter()
            logits = columns[name](inputs)
            synchronize()
            seconds[name].append(time.perf_counter() - start)
            nats[name].append(F.cross_entropy(logits.detach().flatten(0, 1), targets.flatten()).item())
            del logits  # else the time to free the tensors saved for backward counts for the next column
    return {
        name: {
            "bits_per_byte": statistics.fmean(nats[name]) / math.log(2),
            "tokens_per_second": BATCH * WINDOW / statistics.median(seconds[name]),
        }
        for name in columns
    }


@torch.no_grad()
def bits_per_byte(function: Callable[[Tensor], Tensor], batches: list[tuple[Tensor, Tensor]]) -> float:
    """Held-out bits per byte of one model."""
    nats = [F.cross_entropy(function(inputs).flatten(0, 1), targets.flatten()).item() for inputs, targets in batches]
    return statistics.fmean(nats) / math.log(2)


def with_dense_layers(
    swapped: nn.Module, bf16: float, batches: list[tuple[Tensor, Tensor]]
) -> dict[str, dict[str, float]]:
    """Quality when the dense layers of a model with NVFP4 experts follow: attention and shared experts, then the head.

    They are small here, and `linears=True` would leave them in 16 bits: a function takes them.
    """
    found: dict[str, dict[str, float]] = {}
    choices: dict[str, Callable[[nn.Module, str], bool]] = {
        "attention and shared experts": lambda module, path: path != "head",
        "these and the head": lambda module, path: True,
    }
    for name, choice in choices.items():
        model = quantize_(copy.deepcopy(swapped), linears=choice)
        bits = bits_per_byte(model, batches)
        found[name] = {"bits_per_byte": bits, "loss_relative_to_bf16_percent": 100 * (bits / bf16 - 1)}
    return found


def inner_compiler(device: torch.device) -> str:
    """Return "inductor" where it works (a CPU needs a C++ compiler), else "aot_eager" after a line that says why."""
    try:
        torch.compile(lambda x: x.sin() + 1, fullgraph=True)(torch.ones(64, device=device))
    except Exception as error:  # no compiler, no Python headers, no Triton, ...
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        print(f"torch.compile: inductor does not work here ({reason}), aot_eager replaces it")
        return "aot_eager"
    return "inductor"


def expert_bytes(model: nn.Module) -> int:
    """Return the bytes of the routed experts' weights, 16-bit or packed."""
    wide = sum(module.weight.nbytes for module in model.modules() if isinstance(module, GroupedLinear))
    return wide + sum(m.packed_weight.nbytes for m in model.modules() if isinstance(m, NVFP4GroupedLinear))


@torch.no_grad()
def generate(
    compiled: Callable[[Tensor], Tensor], prompt: bytes, length: int, device: torch.device, seed: int
) -> bytes:
    """Continues a prompt by `length` bytes at temperature 0.5.

    The model always gets WINDOW bytes, because Thunder traces again for each new length: a short text is padded on the
    right, which causal attention does not read.
    """
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in progress_bar(range(length), desc="generating", unit="byte"):
        window = text[-WINDOW:]
        logits = compiled(torch.tensor([window + [0] * (WINDOW - len(window))], device=device))[0, len(window) - 1]
        text.append(int(torch.multinomial((logits.cpu() / 0.5).softmax(-1), 1, generator=generator)))
    return bytes(text)


# ---- output


def machine(device: torch.device) -> str:
    """Return the GPU's name, or the CPU's with what of it multiplies bf16."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = cpu_info().get("model name") or platform.processor() or platform.machine()
    return " ".join([name, *bf16_instructions()])


def cpu_info() -> dict[str, str]:
    """Return what Linux says about the CPU, else nothing."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def bf16_instructions() -> list[str]:
    """Return the CPU's instruction sets that multiply bf16, as far as Linux names them."""
    info = cpu_info()
    flags = (info.get("flags") or info.get("Features") or "").split()
    return [unit for unit in ("avx512_bf16", "amx_bf16", "bf16") if unit in flags]


def table(results: dict[str, dict[str, float]], labels: dict[str, str]) -> str:
    """Return the numbers of all columns, aligned."""
    columns = [results[name] for name in labels]
    rows = [
        ["", *labels.values()],
        ["held-out bits per byte", *(f"{c['bits_per_byte']:.4f}" for c in columns)],
        ["expert weights a pass reads, KiB", *(f"{c['expert_bytes_read'] / 1024:,.0f}" for c in columns)],
        ["expert weights in memory, KiB", *(f"{c['expert_bytes_held'] / 1024:,.0f}" for c in columns)],
        ["tokens per second (median)", *(f"{c['tokens_per_second']:,.0f}" for c in columns)],
        [
            "expert GEMMs in 4 or 8 bits",
            *(f"{c['gemms_rewritten']} of {c['gemms']}" if c["gemms"] else "-" for c in columns),
        ],
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)


def plot(losses: list[float], results: dict[str, dict[str, float]], labels: dict[str, str], path: Path) -> None:
    """Plot the loss curve, and a bar per column for bits per byte, memory and speed."""
    figure = Figure(figsize=(20, 4.5), layout="constrained")
    curve, *panels = figure.subplots(1, 4, width_ratios=(1.3, 1, 1, 1))
    smooth = [statistics.fmean(losses[max(0, step - 19) : step + 1]) for step in range(len(losses))]
    curve.plot(losses, color="0.8", label="each step")
    curve.plot(smooth, color="C0", label="mean of 20 steps")
    curve.axhline(results["thunder_bf16"]["bits_per_byte"], color="C3", linestyle="--", label="held out, at the end")
    curve.set(title="Training under Thunder", xlabel="step", ylabel="bits per byte")
    curve.legend()
    bars = (
        ("Held-out bits per byte (less is better)", "bits_per_byte", 1.0, "{:.3f}"),
        ("Expert weights in memory, MiB (less is better)", "expert_bytes_held", 2.0**-20, "{:.2f}"),
        ("Tokens per second (more is better)", "tokens_per_second", 1.0, "{:,.0f}"),
    )
    names = [label.replace(" ", "\n", 1).replace(" (", "\n(") for label in labels.values()]
    for panel, (title, key, factor, form) in zip(panels, bars, strict=True):
        heights = [results[name][key] * factor for name in labels]
        panel.bar_label(panel.bar(names, heights, color=["0.6", "C0", "C1", "C4", "C2", "C5"]), fmt=form, fontsize=9)
        panel.set_title(title, fontsize=10)
        panel.tick_params(axis="x", labelsize=8)
    figure.savefig(path, dpi=120)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small byte-level language model of Llama4MoE blocks on the Python standard library's "
        "sources, then compare it in bf16 and in NVFP4, under Lightning Thunder and torch.compile: quality, memory, "
        "speed.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=1000, help=f"training steps, each of {BATCH * WINDOW:,} bytes")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the batches and the generated text")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size, a multiple of 16")
    parser.add_argument("--layers", type=int, default=2, help="number of blocks")
    parser.add_argument(
        "--experts", choices=("GroupedSwiGLU", "GroupedMLP"), default="GroupedSwiGLU", help="the experts' module"
    )
    parser.add_argument("--output", type=Path, default=Path("out"), metavar="DIR", help="where the plot and JSON go")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    args = parser.parse_args(argv)
    for name in ("steps", "layers"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: got {getattr(args, name)}, wanted at least 1")
    if args.hidden < 32 or args.hidden % 32:
        parser.error(f"--hidden: got {args.hidden}, wanted a positive multiple of 32 (the block of MXFP8)")
    if not 0 <= args.seed < 2**63:
        parser.error(f"--seed: got {args.seed}, wanted a number between 0 and 2**63 - 1")
    try:
        torch.empty(0, device=args.device)
        args.device = torch.device(args.device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: this torch was built without CUDA
        parser.error(f"--device: cannot use {args.device!r}: {str(error).splitlines()[0]}")
    try:
        args.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output: cannot make the directory: {error}")
    return args


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs everything; returns the content of the JSON file."""
    started = time.perf_counter()
    args = parse(argv)
    root = Path(sysconfig.get_path("stdlib"))
    train_files, held_out_files = split_files(source_files(root))
    if sum(path.stat().st_size for path in held_out_files) < HELD_OUT_BYTES:
        raise SystemExit(f"this Python comes without most sources of its standard library: too few .py files in {root}")
    text, held_out = read_bytes(train_files), read_bytes(held_out_files)
    print(f"text   the library of Python {platform.python_version()}")
    print(f"       {len(train_files)} files to train on ({len(text):,} bytes)")
    print(f"       {len(held_out_files)} files held out ({len(held_out):,} bytes)")

    torch.manual_seed(args.seed)
    model = ByteModel(args.hidden, args.layers).to(args.device, torch.bfloat16)
    model = with_grouped_mlp(model) if args.experts == "GroupedMLP" else model
    parameters = sum(parameter.numel() for parameter in model.parameters())
    wide = expert_bytes(model)
    print(f"model  {parameters:,} bf16 parameters, {wide // 2:,} of them in {args.layers} x {EXPERTS} experts")
    if args.device.type == "cpu" and not bf16_instructions():
        print("       trained in float32: this CPU has no instructions for bf16 and takes many times as long with it")
        model.float()
    trained = thunder.jit(model, executors=[moe_executor])
    losses = train(trained, model, text, args)
    if next(model.parameters()).dtype == torch.float32:
        trained = thunder.jit(model.bfloat16(), executors=[moe_executor])
        with warnings.catch_warnings():  # as in `train`
            warnings.simplefilter("ignore", RewriteWarning)
            trained(windows(text, torch.zeros(BATCH, dtype=torch.int64), args.device)[0])

    # Thunder 0.2.6 alone cannot run torch's grouped GEMM (its torch executor's checker refuses every call), so the
    # bf16 column is the trained model: experts that require a gradient stay 16-bit. Gradients are therefore
    # enabled for this column; keeping what a backward would need costs it a little speed.
    fixed = copy.deepcopy(model).requires_grad_(False).eval()
    swapped = quantize_(copy.deepcopy(fixed))
    rewritten = thunder.jit(fixed, executors=[moe_executor])
    quantized = thunder.jit(swapped, executors=[moe_executor])
    in_mxfp8 = quantize_(copy.deepcopy(fixed), format="mxfp8")
    of_8_bits = thunder.jit(in_mxfp8, executors=[moe_executor])
    inner = inner_compiler(args.device)
    labels = dict(COLUMNS)
    if inner != "inductor":
        labels["compile_nvfp4"] += f" ({inner})"
    options: dict[str, Any] = {"thunder_moe.inner": inner}
    register("torch")  # the backend "thunder_moe"
    optimized = torch.compile(fixed, backend="thunder_moe", dynamic=False, options=options)
    inference = torch.no_grad()
    compiled = (rewritten, optimized, quantized, of_8_bits)
    functions = (inference(fixed), trained, *map(inference, compiled))
    batches = held_out_batches(held_out, args.device)
    results = compare(dict(zip(COLUMNS, functions, strict=True)), batches)
    dense = with_dense_layers(swapped, results["thunder_bf16"]["bits_per_byte"], batches)
    narrow, bytes_of_mxfp8 = expert_bytes(swapped), expert_bytes(in_mxfp8)
    # The rewrite while compiling leaves the model its own 16-bit weights; quantize_ frees them. Thunder and
    # torch.compile share one NVFP4 copy; each column counts it, as if it were alone.
    read = (wide, wide, narrow, narrow, narrow, bytes_of_mxfp8)
    held = (wide, wide, wide + narrow, wide + narrow, narrow, bytes_of_mxfp8)
    reports = (None, *map(rewrite_report, (trained, *compiled)))
    for name, report, *sizes in zip(COLUMNS, reports, read, held, strict=True):
        results[name] |= dict(zip(("expert_bytes_read", "expert_bytes_held"), sizes, strict=True))
        results[name] |= {"gemms": len(report or ()), "gemms_rewritten": len(report.rewritten) if report else 0}
        if report:
            print(f"\nrewrite_report, {labels[name]}:\n{report}")

    sample = generate(functions[2], b"import os\n\n\ndef ", 240, args.device, args.seed).decode(errors="replace")
    print(f"\nwritten by the NVFP4 model:\n{sample}\n")
    print(table(results, labels))
    change = 100 * (results["thunder_nvfp4"]["bits_per_byte"] / results["thunder_bf16"]["bits_per_byte"] - 1)
    print(f"NVFP4 held-out loss relative to bf16: {change:+.2f} %")
    of_mxfp8 = 100 * (
        results["thunder_mxfp8_quantize_"]["bits_per_byte"] / results["thunder_bf16"]["bits_per_byte"] - 1
    )
    print(f"MXFP8 held-out loss relative to bf16: {of_mxfp8:+.2f} %")

    for name, quality in dense.items():
        bits, change_too = quality["bits_per_byte"], quality["loss_relative_to_bf16_percent"]
        print(f"  with {name} in NVFP4, too: {bits:.4f} bits per byte, {change_too:+.2f} %")

    seconds = time.perf_counter() - started
    numbers = {
        "columns": results,
        "labels": labels,
        "nvfp4_loss_relative_to_bf16_percent": change,
        "mxfp8_loss_relative_to_bf16_percent": of_mxfp8,
        "with_dense_layers": dense,
        "held_out_bytes": HELD_OUT_BYTES,
        "training_bits_per_byte": losses,
        "sample": sample,
        "options": {**vars(args), "device": str(args.device), "output": str(args.output)},
        "parameters": parameters,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "thunder": thunder.__version__},
        "machine": machine(args.device),
        "threads": torch.get_num_threads(),
        "seconds": seconds,
    }
    stem = args.output / "llama4_moe_text"
    stem.with_suffix(".json").write_text(json.dumps(numbers, indent=2) + "\n")
    plot(losses, results, labels, stem.with_suffix(".png"))
    where = f"{machine(args.device)}, {torch.get_num_threads()} threads"
    print(f"\nwrote {stem}.png and {stem}.json after {seconds:.0f} s on {where}")
    return numbers


if __name__ == "__main__":
    main()
