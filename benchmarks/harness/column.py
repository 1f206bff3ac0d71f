"""Measures one column of the model suite: one model, in one form, in a process of its own.
Started by suites/model.py as `python -m benchmarks.harness.column SPEC FILE`; suites/inference.py calls its checks.
Calls harness/{models,decode,timing}.py.

FILE receives a JSON object per line as results come in, each a part of the column's row. With `turns` the process says
{"ready": true} there before it measures, and measures once its standard input has a line: then nothing else runs.
Before it compiles again it says {"measured": true}, and waits for another line: others may be ready to measure.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
import torch.multiprocessing  # teaches ForkingPickler to share CUDA tensors
from torch import Tensor, nn

from benchmarks.harness.decode import DecodeStep, generate_tokens_per_second, prefill, step_bytes, tensor_bytes
from benchmarks.harness.models import build, config_of
from benchmarks.harness.roofline import read_bandwidth
from benchmarks.harness.timing import Timing, measure
from thunder_moe import GroupedSwiGLU, dequantize_, quantize_, rewrite_report
from thunder_moe.integrations.huggingface.experts import expert_blocks
from thunder_moe.kernels.dense import why_slower

__all__ = [
    "COLUMNS",
    "TOLERANCE",
    "Form",
    "Spec",
    "quantizer",
    "require_rewritten",
    "require_same_logits",
    "run",
    "token_errors",
]

# Of the logits' relative error, per token: the median (bf16 roundings in another order: 0.06 for GPT-OSS in bf16), and
# the share of tokens beyond APART, which the router sends to another expert because of such a rounding.
TOLERANCE, APART, MOST_APART = 0.1, 0.2, 0.25
CHECK_LAYERS, CHECK_BATCH, CHECK_CONTEXT, CHECK_PROMPT, CHECK_KEPT = 2, 64, 24, 200, 64
# Of a graph that is checked itself: texts of decode steps, prompts and tokens of prefills.
CHECK_TEXTS, CHECK_PROMPTS, CHECK_TOKENS = 32, 16, 2048
PROFILE_ROWS = 25


@dataclass(frozen=True)
class Form:
    """Says how a column prepares a model.

    Attributes:
        quantize: the arguments of `quantize_`, or None for a model of 16-bit weights.
        compiled: whether decode steps and prefills are compiled; on CUDA a compiled decode step is in a CUDA graph.
        backend: of torch.compile, or None for the one of --inner.
    """

    quantize: dict[str, Any] | None = None
    compiled: bool = True
    backend: str | None = None

    @property
    def generates(self) -> bool:
        """True if this form times an eager generate() of its own: compiled bf16 would repeat the eager column."""
        return not self.compiled or self.quantize is not None

    @property
    def packed(self) -> bool:
        """True if the experts' kernels read weights of 4 or 8 bits."""
        return self.quantize is not None or self.backend is not None


COLUMNS = {
    "eager bf16": Form(compiled=False),
    "compiled bf16": Form(),
    "thunder_moe": Form(backend="thunder_moe"),
    "quantize_": Form(quantize={}),
    "quantize_ linears": Form(quantize={"linears": True}),
    "quantize_ mxfp8": Form(quantize={"format": "mxfp8"}),
    "quantize_ mxfp8 linears": Form(quantize={"format": "mxfp8", "linears": True}),
}


@dataclass(frozen=True)
class Spec:
    """The arguments of one process.

    Attributes:
        model: as `models.build` takes it.
        column: of COLUMNS, or "limits" for the device's bandwidth.
        device: "cpu" or "cuda".
        layers: of a shortened model.
        attention: transformers' name.
        batches, context: of decode steps.
        prompts: tokens of prefills.
        generate: prompt and new tokens of generate(), or None.
        inner: the compiler, "inductor" or "aot_eager".
        rounds, budget: as `timing.measure` takes them.
        seed: of the weights.
        profile: whether one decode step of each batch and one prefill of each length is profiled.
        part: "all", or of a column that several processes measure: "load", "check", "measure".
        weights: a file by which "load" shares its model with the others.
        turns: whether it waits for its turn before it measures.
    """

    model: str
    column: str
    device: str
    layers: int | None = None
    attention: str = "sdpa"
    batches: Sequence[int] = (1,)
    context: int = 512
    prompts: Sequence[int] = ()
    generate: tuple[int, int] | None = (64, 32)
    inner: str = "inductor"
    rounds: int = 30
    budget: float = 1.0
    seed: int = 0
    profile: bool = False
    part: str = "all"
    weights: str | None = None
    turns: bool = False


@dataclass
class _Column:
    """A process's work; `emit` takes parts of the row."""

    spec: Spec
    emit: Callable[[dict[str, Any]], None]
    form: Form = field(init=False)
    device: torch.device = field(init=False)
    _shared_bytes: int = field(default=0, init=False)
    _turns: _Turns = field(init=False)
    _reference: nn.Module | None = field(default=None, init=False)  # of graphs that are checked themselves
    _errors: list[Tensor] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.form, self.device = COLUMNS[self.spec.column], torch.device(self.spec.device)
        self._turns = _Turns(self.spec.turns, self.emit)

    def run(self) -> None:
        part = self.spec.part
        if part == "all" and self._is_small():
            self._reference = self._build_reference()
        elif part in ("all", "check"):
            self._check()
        if part in ("all", "measure"):
            self._run(self._load() if self.spec.weights is None else self._attach())
        if part == "load":
            self._serve()

    def _run(self, model: nn.Module) -> None:
        if self.spec.batches:
            forward = self._compile(model)
            step = self._cell("cache", "", lambda: DecodeStep(model, max(self.spec.batches), self.spec.context))
            for batch in self.spec.batches:
                if isinstance(step, DecodeStep):
                    self._cell("decode", str(batch), partial(self._decode, model, forward, step, batch))
                else:
                    self.emit({"decode": {str(batch): step}})
            del step
            torch._dynamo.reset()
        if self.spec.prompts:
            forward = self._compile(model)
            prompts = {tokens: self._prompt(model, tokens) for tokens in self.spec.prompts}
            first = {
                tokens: self._guarded(partial(self._first_prefill, forward, ids)) for tokens, ids in prompts.items()
            }
            for tokens, ids in prompts.items():
                self._cell("prefill", str(tokens), partial(self._prefill, forward, ids, first[tokens]))
            torch._dynamo.reset()
        if self.form.generates and self.spec.generate is not None:
            self._cell("generate", "", lambda: self._generate(model))

    def _serve(self) -> None:
        """Loads the weights and shares them until the process's input ends."""
        assert self.spec.weights is not None
        model = self._load()
        unfinished = Path(f"{self.spec.weights}.unfinished")
        unfinished.write_bytes(ForkingPickler.dumps(model))
        unfinished.rename(self.spec.weights)
        sys.stdin.read()

    def _attach(self) -> nn.Module:
        """Return the model of another process, whose memory it is."""
        assert self.spec.weights is not None
        model: Any = pickle.loads(Path(self.spec.weights).read_bytes())
        if self.spec.attention != "sdpa":
            model.set_attn_implementation(self.spec.attention)
        self.emit({"attention": model.config._attn_implementation})
        self._shared_bytes = tensor_bytes(model)
        return model  # type: ignore[no-any-return]

    def _cell(self, kind: str, key: str, work: Callable[[], Any]) -> Any:
        """Runs a cell and emits its result."""
        self._reset_peak()
        result = self._guarded(work)
        if isinstance(result, dict):
            result |= self._peak()
            self.emit({kind: {key: result} if key else result})
        return result

    def _guarded(self, work: Callable[[], Any]) -> Any:
        """Return the result of `work`, or an "out of memory" entry if it does not fit."""
        try:
            result = work()
        except torch.OutOfMemoryError:
            result = {"error": "out of memory"}
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return result

    def _is_small(self) -> bool:
        """True if the timed model's own graphs are checked, because it has few layers.

        On a CPU alone, where compiling other graphs for the check takes most of a column's time.
        """
        layers: int = config_of(self.spec.model, self.spec.layers).num_hidden_layers
        return self.device.type == "cpu" and layers <= CHECK_LAYERS and not Path(self.spec.model).is_dir()

    def _check_step(self, model: nn.Module, forward: Callable[..., Any], step: DecodeStep) -> None:
        """Compares decode steps of a graph that is timed with the reference's, behind the same keys and values."""
        if self._reference is None:
            return
        reference = DecodeStep(self._reference, step.batch, self.spec.context)
        generator = torch.Generator().manual_seed(1)
        vocabulary = step.config.vocab_size
        context = torch.randint(1, vocabulary, (step.batch, self.spec.context), generator=generator)
        reference.fill(self._reference, context)
        for ours, theirs in zip(step.keys_values, reference.keys_values, strict=True):
            for tensor, other in zip(ours, theirs, strict=True):
                tensor[: step.batch].copy_(other)
        errors = []
        for _ in range(-(-CHECK_TEXTS // step.batch)):
            token = torch.randint(1, vocabulary, (step.batch, 1), generator=generator)
            logits = []
            for each, call in ((step, forward), (reference, self._reference)):
                each.token.copy_(token)  # in place: another tensor could be compiled for
                each.rewind()
                logits.append(each(call).float())
            errors.append(token_errors(*logits))
        if self.form.backend == "thunder_moe":
            require_rewritten(forward, 2 * len(expert_blocks(model)))
        self._judge(torch.cat(errors))

    def _check_prefill(self, forward: Callable[..., Any], tokens: int) -> None:
        """Compares prefills of a timed graph with the reference's."""
        if self._reference is None:
            return
        generator = torch.Generator().manual_seed(1)
        config: Any = self._reference.config
        errors = []
        for _ in range(max(2, min(CHECK_PROMPTS, CHECK_TOKENS // tokens))):
            ids = torch.randint(1, config.vocab_size, (1, tokens), generator=generator)
            errors.append(token_errors(prefill(forward, ids).float(), prefill(self._reference, ids).float()))
        self._judge(torch.cat(errors))

    def _judge(self, errors: Tensor) -> None:
        """Emits the worst errors of the checked parts; `errors`, one per token, are the last part's.

        Raises:
            RuntimeError: they are too large.
        """
        self._errors.append(errors)
        require_same_logits(self._errors, self.emit)

    def _build(self, layers: int | None, finish: Callable[[nn.Module, str], None] | None) -> nn.Module:
        how: dict[str, Any] = dict(attention=self.spec.attention, seed=self.spec.seed)
        return build(self.spec.model, self.device, layers=layers, finish=finish, **how)

    def _build_reference(self) -> nn.Module:
        """Builds the reference: transformers' code on the column's weights, dequantized if it quantizes."""
        quantized = self.form.quantize
        if quantized is None and self.form.packed:
            quantized = {}
        model = build(
            self.spec.model, self.device, layers=min(CHECK_LAYERS, self.spec.layers or CHECK_LAYERS),
            seed=self.spec.seed, finish=None if quantized is None else quantizer(quantized),
        )  # fmt: skip
        return model if quantized is None else dequantize_(model)

    def _check(self) -> None:
        """Compares logits with eager 16-bit code on the same (dequantized) weights.

        It compares a decode step after the same keys and values and, when prefills are timed, a prefill. The model has
        its first two layers, so that the routing of both is nearly the same. There are many tokens, because the few
        that are routed differently differ much.
        """
        step, wanted = self._check_logits(None)
        _, found = self._check_logits(step)
        for pair in zip(found, wanted, strict=True):
            self._judge(token_errors(*pair))

    def _check_logits(self, reference: DecodeStep | None) -> tuple[DecodeStep, list[Tensor]]:
        """Return the step and logits of the column, or of what it is compared with if its step `reference` is None."""
        if reference is None:
            model = self._build_reference()
        else:
            quantized = self.form.quantize
            layers = min(CHECK_LAYERS, self.spec.layers or CHECK_LAYERS)
            model = self._build(layers, None if quantized is None else quantizer(quantized))
        step = DecodeStep(model, CHECK_BATCH, CHECK_CONTEXT)
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(1, step.config.vocab_size, (CHECK_BATCH, CHECK_CONTEXT), generator=generator)
        prompt = torch.randint(1, step.config.vocab_size, (1, CHECK_PROMPT), generator=generator).to(self.device)
        if reference is None:
            step.fill(model, ids.to(self.device))
        else:
            for ours, theirs in zip(step.keys_values, reference.keys_values, strict=True):
                for tensor, other in zip(ours, theirs, strict=True):
                    tensor.copy_(other)
        step.choose(CHECK_BATCH)
        forward = model if reference is None else self._compile(model)
        logits = [step(forward).float()]
        if reference is not None and self.form.backend == "thunder_moe":
            require_rewritten(forward, 2 * len(expert_blocks(model)))
        torch._dynamo.reset()
        if self.spec.prompts:
            forward = model if reference is None else self._compile(model)
            logits.append(prefill(forward, prompt, CHECK_KEPT).float())
            torch._dynamo.reset()
        return step, logits

    def _load(self) -> nn.Module:
        """Builds the model, and quantizes each layer as soon as it is built."""
        quantizing = 0.0
        finish = None if self.form.quantize is None else quantizer(self.form.quantize)

        def timed(module: nn.Module, name: str) -> None:
            nonlocal quantizing
            start = self._clock()
            if finish is not None:
                finish(module, name)
                quantizing += self._clock() - start

        if self.device.type == "cuda":
            torch.zeros((), device=self.device)  # makes the context
        if self.spec.part == "load":
            self._turns.measure()
        self._reset_peak()
        start = self._clock()
        model = self._build(self.spec.layers, timed)
        seconds = self._clock() - start
        config: Any = model.config
        self.emit({
            "load": {"build_seconds": seconds - quantizing, "quantize_seconds": quantizing, **self._peak()},
            "layers": config.num_hidden_layers,
            "attention": config._attn_implementation,
            "model_bytes": tensor_bytes(model),
        })  # fmt: skip
        return model

    def _compile(self, model: nn.Module) -> Callable[..., Any]:
        if not self.form.compiled:
            return model
        how: dict[str, Any] = dict(backend=self.spec.inner)
        if self.form.backend is not None:
            how = dict(backend=self.form.backend, options={"thunder_moe.inner": self.spec.inner})
        compiled: Callable[..., Any] = torch.compile(model, fullgraph=True, **how)
        return compiled

    def _generate(self, model: nn.Module) -> dict[str, Any]:
        prompt_tokens, new_tokens = self.spec.generate or (1, 1)
        self._turns.measure()
        how = dict(prompt_tokens=prompt_tokens, new_tokens=new_tokens, rounds=max(2, min(5, self.spec.rounds)))
        first, median, third = quantiles(generate_tokens_per_second(model, **how), n=4, method="inclusive")
        return {"tokens_per_second": median, "quartiles": [first, third]}

    def _decode(self, model: nn.Module, forward: Callable[..., Any], step: DecodeStep, batch: int) -> dict[str, Any]:
        # One graph for all batches but 1, on which torch specializes.
        step.choose(batch, dynamic=batch > 1 and sum(other > 1 for other in self.spec.batches) > 1)
        first_call, logits = self._first_call(lambda: step(forward))
        if not bool(logits.isfinite().all()):
            raise RuntimeError("wrong: the logits are not finite")
        self._check_step(model, forward, step)
        timing = self._measure(lambda: step(forward), step.rewind, graph=self.form.compiled)
        needed = step_bytes(model, _experts(model), step, packed=self.form.packed and self.form.quantize is None)
        result: dict[str, Any] = {**asdict(timing), "first_call_seconds": first_call, "step_bytes": needed}
        if self.spec.profile:
            result["profile"] = self._profile(lambda: step(forward), step.rewind)
        return result

    def _prompt(self, model: nn.Module, tokens: int) -> Tensor:
        """Random ids (1, tokens)."""
        generator = torch.Generator(device=self.device).manual_seed(0)
        config: Any = model.config
        ids = torch.randint(1, config.vocab_size, (1, tokens), device=self.device, generator=generator)
        if len(self.spec.prompts) > 1:
            torch._dynamo.maybe_mark_dynamic(ids, 1)
        return ids

    def _first_prefill(self, forward: Callable[..., Any], ids: Tensor) -> dict[str, Any]:
        return {"first_call_seconds": self._first_call(lambda: prefill(forward, ids))[0]}

    def _prefill(self, forward: Callable[..., Any], ids: Tensor, first: dict[str, Any]) -> dict[str, Any]:
        if "error" in first:
            return first
        self._check_prefill(forward, ids.shape[1])
        # Nobody captures a graph for each length of a prompt: plain calls.
        timing = self._measure(lambda: prefill(forward, ids), graph=False)
        result: dict[str, Any] = {**asdict(timing), **first}
        if self.spec.profile:
            result["profile"] = self._profile(lambda: prefill(forward, ids))
        return result

    def _first_call(self, function: Callable[[], Tensor]) -> tuple[float, Tensor]:
        """Compiles, at the same time as other processes do.

        Without the collector of garbage, which visits the graphs again and again and finds little: to trace 48 small
        layers took 28.6 s of a CPU's time and 0.63 GB, without it 25.2 s and 0.68 GB.
        """
        if self.form.compiled:
            self._turns.compile()
        gc.disable()
        try:
            start = self._clock()
            result = function()
            return self._clock() - start, result
        finally:
            gc.enable()

    def _measure(self, function: Callable[[], Any], before: Callable[[], None] | None = None, *, graph: bool) -> Timing:
        how: dict[str, Any] = dict(rounds=self.spec.rounds, min_rounds=min(3, self.spec.rounds), slow=600.0)
        how |= dict(budget=self.spec.budget, own_graphs=() if graph else ("function",), before=before)
        self._turns.measure()
        timings = measure({"function": function}, device=self.device, **how)
        timing = timings["function"]
        return timing if graph or self.device.type == "cpu" else replace(timing, method="plain calls")

    def _profile(self, function: Callable[[], Any], before: Callable[[], None] | None = None) -> list[dict[str, Any]]:
        """Return the kernels (operators on a CPU) of one plain call, those that take most time first."""
        from torch.profiler import ProfilerActivity, profile

        cuda = self.device.type == "cuda"
        if before is not None:
            before()
        with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as found:
            function()
            if cuda:
                torch.cuda.synchronize()
        events = [
            {"kernel": event.key, "count": event.count,
             "microseconds": event.self_device_time_total if cuda else event.self_cpu_time_total}
            for event in found.key_averages()
        ]  # fmt: skip
        events.sort(key=lambda event: -event["microseconds"])
        rest = events[PROFILE_ROWS:]
        others = {"kernel": f"{len(rest)} others", "count": sum(event["count"] for event in rest),
                  "microseconds": sum(event["microseconds"] for event in rest)}  # fmt: skip
        return [*events[:PROFILE_ROWS], *([others] if rest else [])]

    def _clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _reset_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def _peak(self) -> dict[str, int]:
        if self.device.type != "cuda":
            return {}
        return {"peak_bytes": self._shared_bytes + torch.cuda.max_memory_allocated()}


class _Turns:
    """Asks the process that started this one when it may measure, and after that when it may compile.

    Args:
        waits: whether there is one to ask.
        emit: as that of `run`.
    """

    def __init__(self, waits: bool, emit: Callable[[dict[str, Any]], None]) -> None:
        self._waits, self._emit, self._measures = waits, emit, False

    def measure(self) -> None:
        """Returns when nothing else runs; the turn lasts until `compile`, or the end of the process.

        Raises:
            EOFError: the process that gives turns has ended.
        """
        if not self._measures:
            self._ask("ready")
            self._measures = True

    def compile(self) -> None:
        """Returns when nobody else is ready to measure; errors as of `measure`."""
        if self._measures:
            self._ask("measured")
            self._measures = False

    def _ask(self, what: str) -> None:
        if self._waits:
            self._emit({what: True})
            if not sys.stdin.readline():
                raise EOFError("the benchmark has ended")


def run(spec: Spec, emit: Callable[[dict[str, Any]], None]) -> None:
    """Measures a column.

    Args:
        spec: what to measure.
        emit: called with each part of the row.

    Raises:
        RuntimeError: the column computes something wrong, or was not compiled to what it says.
        ValueError: the model has no experts.
    """
    if spec.column == "limits":
        _Turns(spec.turns, emit).measure()
        emit({"read_bytes_per_second": read_bandwidth(torch.device(spec.device))})
    else:
        _Column(spec, emit).run()


def require_same_logits(parts: Sequence[Tensor], emit: Callable[[dict[str, Any]], None]) -> None:
    """Emits the worst errors of the parts of a check, each with one relative error per token.

    Raises:
        RuntimeError: they are too large.
    """
    error = max(part.median().item() for part in parts)
    apart = max((part > APART).float().mean().item() for part in parts)
    emit({"relative_error": error, "tokens_apart": apart})
    if error > TOLERANCE or apart > MOST_APART:
        raise RuntimeError(
            f"wrong: relative error {error:.2g} of a token's logits, wanted at most {TOLERANCE} in the median; "
            f"{apart:.0%} of the tokens differ by more than {APART}, wanted at most {MOST_APART:.0%}"
        )


def token_errors(found: Tensor, wanted: Tensor) -> Tensor:
    """Relative error of each token's logits; infinite where anything is not finite."""
    errors: Tensor = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    return errors.flatten().nan_to_num(nan=torch.inf)


def quantizer(options: dict[str, Any]) -> Callable[[nn.Module, str], None]:
    """Return the function that `build` calls with each layer and the model; it quantizes what quantize_ finds."""

    def finish(module: nn.Module, name: str) -> None:
        # The head is in no layer; all else of the model is quantized by then.
        parts = list(module.modules()) if name else [module.get_output_embeddings()]  # type: ignore[operator]
        linears = [part.weight for part in parts if isinstance(part, nn.Linear) and "linears" in options]
        if (
            (name and expert_blocks(module))
            or any(isinstance(part, GroupedSwiGLU) for part in parts)
            or any(why_slower(weight.device, weight.dtype, *weight.shape) is None for weight in linears)
        ):
            quantize_(module, **options)

    return finish


def _experts(model: nn.Module) -> list[str]:
    """Return names of experts modules, 16-bit or quantized."""
    from thunder_moe.integrations.huggingface.experts import NVFP4Experts

    blocks = expert_blocks(model)
    return [*blocks, *(name for name, module in model.named_modules() if isinstance(module, NVFP4Experts))]


def require_rewritten(forward: Any, weights: int) -> None:
    """Raise a RuntimeError unless a compiled model reads that many experts' weights in NVFP4 or MXFP8, and no other."""
    report = rewrite_report(forward)
    rewritten = {entry.gemm.weight for entry in report if entry.rewritten}
    if len(rewritten) != weights or not all(entry.rewritten for entry in report):
        raise RuntimeError(f"wanted {weights} experts' weights in 4 or 8 bits, compiled was\n{report}")


def main(argv: Sequence[str]) -> None:
    """Run the process: takes a Spec as JSON, and the file for results."""
    if sys.platform == "linux":  # PR_SET_PDEATHSIG: it ends with the process that started it
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    spec = Spec(**json.loads(argv[0]))
    with Path(argv[1]).open("a") as file:

        def emit(part: dict[str, Any]) -> None:
            file.write(json.dumps(part) + "\n")
            file.flush()

        try:
            run(spec, emit)
        except torch.OutOfMemoryError:  # the weights do not fit
            emit({"error": "out of memory"})
        except (RuntimeError, ValueError) as error:
            emit({"error": str(error)})
            raise
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # to free the graphs of 48 layers one by one takes seconds, in which nothing else is measured


if __name__ == "__main__":
    main(sys.argv[1:])
