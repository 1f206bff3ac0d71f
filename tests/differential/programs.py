"""The generator: a random program is a module with several grouped GEMMs, and calls of it between updates of weights.
Called by execution and by the runner; calls nothing: programs are lists of statements, rendered as Python source.

`DISABLED` lists the features that a compiler does not take, with the reason.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["DISABLED", "Program", "Statement", "generate"]

WIDTHS = (16, 32, 48, 64)


@dataclass
class Statement:
    """A line of a program, or a block: a header line with a body."""

    text: str
    body: list[Statement] | None = None

    def lines(self) -> list[str]:
        if self.body is None:
            return self.text.split("\n")
        inner = [f"    {line}" for statement in self.body for line in statement.lines()]
        return [*self.text.split("\n"), *(inner or ["    pass"])]


@dataclass
class Program:
    """A program.

    Attributes:
        seed: that it was generated from.
        sizes: (experts, features of the input).
        definitions: classes and functions of the module level.
        weights: statements of ``__init__``.
        methods: further methods of the model.
        forward: statements of ``forward(self, x, o, p, s)``; o and p are offsets, s a factor (M, 1) of the rows.
        steps: statements of ``drive(run)``: calls and updates of weights.
        fullgraph: there is no graph break.
        features: names of what the program makes use of.
        format: the number format of the weights.
        dynamic: torch.compile's option.
        entry: "module", or "function" to compile a function that calls the module.
    """

    seed: int
    sizes: tuple[int, int]
    definitions: list[Statement] = field(default_factory=list)
    weights: list[Statement] = field(default_factory=list)
    methods: list[Statement] = field(default_factory=list)
    forward: list[Statement] = field(default_factory=list)
    steps: list[Statement] = field(default_factory=list)
    fullgraph: bool = True
    features: set[str] = field(default_factory=set)
    format: str = "nvfp4"
    dynamic: bool | None = None
    entry: str = "module"

    def source(self) -> str:
        init = Statement("def __init__(self):", [Statement("super().__init__()"), *self.weights])
        result = [Statement("out = []"), *self.forward, Statement("return tuple(out)")]
        forward = Statement("def forward(self, x, o, p, s):", result)
        model = Statement("class Model(nn.Module):", [init, *self.methods, forward])
        drive = Statement("def drive(run):", [Statement("m = run.model"), *self.steps])
        lines = [line for part in (*self.definitions, model, drive) for line in [*part.lines(), ""]]
        return "\n".join(lines)


@dataclass(frozen=True)
class Weight:
    """A weight by the expression that reads it in a method; (experts, n, k), stored as (E, K, N) when transposed."""

    name: str
    n: int
    k: int
    transposed: bool
    frozen: bool = True

    @property
    def read(self) -> str:
        return f"self.{self.name}"

    @property
    def row(self) -> str:
        """The index of one output feature of all experts."""
        return "[..., 0]" if self.transposed else "[:, 0]"


# What a compiler does not take with or without thunder_moe, by feature: why.
_UNTRACED = "Thunder 0.2.6 does not trace it"
_NO_GRADIENT = "Thunder 0.2.6 has no gradient of it"
_PARAMETERS = "Thunder keeps the parameters that it saw"
_SILU = "Thunder's gradient is wrong"
DISABLED: dict[str, dict[str, str]] = {
    "dynamo-eager": {},
    "dynamo-aot": {},
    "dynamo-inductor": {},
    "thunderfx": {
        "swap_tensors": "torch refuses it: Thunder's graphs have weak references to parameters",
        "swapped tensors": "torch refuses it: Thunder's graphs have weak references to parameters",
        "in-place silu": _SILU,
    },
    "thunder": {
        "weight fill": _UNTRACED,
        "aten": _UNTRACED,
        "weight aten": _UNTRACED,
        "cond": _UNTRACED,
        "graph break": "Thunder has none",
        "out=": _UNTRACED,
        "weight out=": _UNTRACED,
        "offsets out=": _UNTRACED,
        "foreach": _UNTRACED,
        "foreach copy": _UNTRACED,
        "weight foreach": _UNTRACED,
        "weight foreach copy": _UNTRACED,
        "copy_": _NO_GRADIENT,
        "index_add_": _NO_GRADIENT,
        "routed experts": _UNTRACED,
        "in-place silu": _SILU,
        "new parameter": _PARAMETERS,
        "new list item": _PARAMETERS,
        "new submodule": _PARAMETERS,
        "exchanged blocks": _PARAMETERS,
        "dynamic": "an option of torch.compile",
        "function": "Thunder takes no parameters from a closure",
        "load_state_dict(assign=True)": _PARAMETERS,
    },
}

Segment = Callable[[list[Statement], str], str]


class Generator:
    """Writes one program.

    Args:
        seed: of the choices.
        disabled: names of features that are left out.
    """

    def __init__(self, seed: int, disabled: frozenset[str] = frozenset()) -> None:
        self.random = random.Random(seed)
        self.disabled = disabled
        self.experts = self.random.randint(2, 4)
        # Blocks of MXFP8 have 32 values.
        self.sizes, self.halves, format = WIDTHS, (16, 32), "nvfp4"
        if self.chance(0.15) and "mxfp8" not in disabled:
            self.sizes, self.halves, format = (32, 64), (32,), "mxfp8"
        self.program = Program(seed, (self.experts, self.random.choice(self.sizes)), format=format)
        self.program.features.update({"mxfp8"} & {format})
        if self.chance(0.1) and self.use("dynamic"):
            self.program.dynamic = True
        if self.chance(0.1) and self.use("function"):
            self.program.entry = "function"
        self.widths = {"x": self.program.sizes[1]}
        self.weights: list[Weight] = []
        self.names = 0
        # At most a few kinds of hazards in a program, and none in a third of them.
        hazards = ["rows", "offsets", "weights", "intermediates", "grad modes", "nested", "out=", "graph breaks"]
        self.hazards = set(self.random.sample(hazards, self.random.choice((0, 1, 1, 2, 3))))
        if "nested" in self.hazards:  # checkpoints run twice: what they read must not change
            self.hazards -= {"rows", "offsets", "weights", "intermediates"}
        self.nested = 0

    # ---- choices

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def use(self, feature: str) -> bool:
        """Whether a feature may be used; it is then one of the program's."""
        if feature in self.disabled:
            return False
        self.program.features.add(feature)
        return True

    def pick(self, choices: dict[str, str]) -> str:
        """One of the texts of features that are not disabled."""
        allowed = [name for name in choices if name not in self.disabled]
        name = self.random.choice(allowed)
        self.program.features.add(name)
        return choices[name]

    def name(self, stem: str, width: int | None = None) -> str:
        self.names += 1
        name = f"{stem}{self.names}"
        if width is not None:
            self.widths[name] = width
        return name

    # ---- the program

    def generate(self) -> Program:
        body, rows = self.program.forward, "x"
        for _ in range(self.random.randint(1, 3)):
            rows = self.segment(body, rows)
            self.hazard(body, rows)
            if self.chance(0.2):
                body.append(Statement(f"out.append({rows})"))
        if not self.weights:
            rows = self.plain(body, rows)
        body.append(Statement(f"out.append({rows})"))
        self.drive()
        self.other_module()
        return self.program

    def segment(self, body: list[Statement], rows: str) -> str:
        """Appends statements that make new rows of rows; returns their name."""
        kinds: list[Segment] = [self.plain, self.swiglu, self.swiglu, self.fused_swiglu, self.pointwise]
        if "nested" in self.hazards and not self.nested:
            kinds += [self.checkpoint, self.cond, self.autograd_function]
        if "grad modes" in self.hazards:
            kinds += [self.grad_mode, self.grad_mode]
        kinds += [self.helper]
        if not self.nested and self.chance(0.15):
            kinds += [self.blocks, self.blocks]
        if not self.nested and self.chance(0.3):
            kinds += [self.dense_experts, self.routed_experts, self.routed_experts]
        return self.random.choice(kinds)(body, rows)

    # ---- weights

    def weight(self, n: int, k: int, transposed: bool | None = None) -> Weight:
        """A new weight, or one that there is already."""
        fitting = [w for w in self.weights if (w.n, w.k) == (n, k) and transposed in (None, w.transposed)]
        if fitting and self.chance(0.3):
            self.program.features.add("shared weight")
            return self.random.choice(fitting)
        transposed = self.chance(0.2) if transposed is None else transposed
        number = len(self.weights)
        shape = f"{self.experts}, {n}, {k}, {number}" + (", transposed=True" if transposed else "")
        frozen = self.chance(0.7)
        stem = "k" if transposed else "w"
        parameter = f"nn.Parameter(exact({shape}), requires_grad={not frozen})"
        kind = self.random.choice(["parameter"] * 5 + ["buffer", "submodule", "flat", "tied", "list"])
        name = f"{stem}{number}"
        if kind == "buffer":
            text = f'self.register_buffer("{name}", exact({shape}))'
        elif kind == "submodule":
            text = f"self.s{number} = nn.Module()\nself.s{number}.{name} = {parameter}"
            name = f"s{number}.{name}"
        elif kind == "list":
            text = f"self.l{name} = nn.ParameterList([{parameter}])"
            name = f"l{name}[0]"
        elif kind == "flat" and self.use("flat buffer"):
            text = (
                f"self.flat{number} = exact({shape}).view(-1)\n"
                f"self.{name} = nn.Parameter(self.flat{number}.view_as(exact({shape})), requires_grad={not frozen})"
            )
        elif kind == "tied" and self.use("tied weight"):
            text = f"self.t{name} = {parameter}\nself.{name} = self.t{name}"
        else:
            text = f"self.{name} = {parameter}"
        self.program.weights.append(Statement(text))
        new = Weight(name, n, k, transposed, frozen or kind == "buffer")
        self.weights.append(new)
        return new

    def mat_b(self, weight: str, transposed: bool) -> str:
        """The expression of (E, K, N) of a weight that an expression reads."""
        if transposed:
            return (
                self.pick({"plain": weight, "mT.mT": f"{weight}.mT.mT", "detach": f"{weight}.detach()"})
                if self.chance(0.3)
                else weight
            )
        forms = {
            "mT": f"{weight}.mT",
            "transpose": f"{weight}.transpose(-2, -1)",
            "transpose(1, 2)": f"{weight}.transpose(1, 2)",
            "torch.transpose": f"torch.transpose({weight}, 1, 2)",
            "permute": f"{weight}.permute(0, 2, 1)",
            "swapaxes": f"{weight}.swapaxes(1, 2)",
        }
        rare = {
            "mT.mT.mT": f"{weight}.mT.mT.mT",
            "detach": f"{weight}.detach().mT",
            "no-op to": f"{weight}.to(torch.bfloat16).mT",
            "mT.contiguous()": f"{weight}.mT.contiguous()",
        }
        return self.pick(rare) if self.chance(0.2) else self.pick(forms)

    def gemm(self, rows: str, weight: str, transposed: bool, offsets: str = "o") -> str:
        call = self.pick(
            {
                "_grouped_mm": "torch._grouped_mm({}, {}, offs={})",
                "_grouped_mm positional": "torch._grouped_mm({}, {}, {})",
                "F.grouped_mm": "F.grouped_mm({}, {}, offs={})",
            }
        )
        return call.format(rows, self.mat_b(weight, transposed), offsets)

    # ---- segments

    def plain(self, body: list[Statement], rows: str) -> str:
        weight = self.weight(self.random.choice(self.sizes), self.widths[rows])
        out = self.name("y", weight.n)
        body.append(Statement(f"{out} = {self.gemm(rows, weight.read, weight.transposed)}"))
        return out

    def swiglu(self, body: list[Statement], rows: str) -> str:
        n, k = self.random.choice(self.sizes), self.widths[rows]
        transposed = self.chance(0.2)
        same = None if self.chance(0.1) else transposed
        gate, up = self.name("gate", n), self.name("up", n)
        gemms = []
        for name in (gate, up):
            weight = self.weight(n, k, same)
            gemms.append(Statement(f"{name} = {self.gemm(rows, weight.read, weight.transposed)}"))
        self.random.shuffle(gemms)
        for number, gemm in enumerate(gemms):
            if "grad modes" in self.hazards and self.chance(0.3) and "no_grad" not in self.disabled:
                gemm = Statement(self.mode(), [gemm])
            body.append(gemm)
            if number == 0:
                self.hazard(body, rows)
        self.hazard(body, rows, gate)
        return self.activation(body, gate, up, n)

    def blocks(self, body: list[Statement], rows: str) -> str:
        """Modules of one class in a list, each with its own weights: SwiGLU and a projection back."""
        if not self.use("blocks"):
            return self.plain(body, rows)
        k, n, name, number = self.widths[rows], self.random.choice(self.halves), self.name("Block"), len(self.weights)
        frozen, form = self.chance(0.7), self.random.choice(("chunk(2, -1)", f"split({n}, -1)"))
        parameter = f"nn.Parameter(exact({{}}, {number} + seed), requires_grad={not frozen})"
        init = [
            Statement("super().__init__()"),
            Statement(f"self.w{number} = {parameter.format(f'{self.experts}, {2 * n}, {k}')}"),
            Statement(f"self.w{number + 1} = {parameter.format(f'{self.experts}, {k}, {n}')}"),
        ]
        forward = [
            Statement(f"gate, up = {self.gemm('r', f'self.w{number}', False)}.{form}"),
            Statement(f"return {self.gemm('F.silu(gate) * up', f'self.w{number + 1}', False)}"),
        ]
        self.program.definitions.append(
            Statement(
                f"class {name}(nn.Module):",
                [Statement("def __init__(self, seed):", init), Statement("def forward(self, r, o):", forward)],
            )
        )
        number_of_blocks, out = self.random.randint(2, 3), self.name("y", k)
        self.program.weights.append(
            Statement(f"self.b{number} = nn.ModuleList([{name}(10 * i) for i in range({number_of_blocks})])")
        )
        for block in range(2):  # an even number, as the names need
            for offset, (rows_of, columns) in enumerate(((2 * n, k), (k, n))):
                self.weights.append(Weight(f"b{number}[{block}].w{number + offset}", rows_of, columns, False, frozen))
        body.append(Statement(f"{out} = {rows}"))
        body.append(Statement(f"for block in self.b{number}:", [Statement(f"{out} = block({out}, o)")]))
        return out

    def fused_swiglu(self, body: list[Statement], rows: str) -> str:
        n, k = self.random.choice(self.halves), self.widths[rows]
        weight = self.weight(2 * n, k)
        both, gate, up = self.name("both", 2 * n), self.name("gate", n), self.name("up", n)
        body.append(Statement(f"{both} = {self.gemm(rows, weight.read, weight.transposed)}"))
        self.hazard(body, rows, both)
        forms = {
            "chunk": f"{both}.chunk(2, -1)",
            "chunk dim=": f"{both}.chunk(2, dim=1)",
            "torch.chunk": f"torch.chunk({both}, 2, dim=-1)",
            "split": f"{both}.split({n}, -1)",
            "torch.split": f"torch.split({both}, {n}, dim=-1)",
            "split sizes": f"{both}.split([{n}, {n}], -1)",
            "slices": f"{both}[..., :{n}], {both}[..., {n}:]",
            "slices of 2 dims": f"{both}[:, :{n}], {both}[:, {n}:]",
            "interleaved": f"{both}[..., 0::2], {both}[..., 1::2]",
            "interleaved without start": f"{both}[..., ::2], {both}[..., 1::2]",
            "unflatten": f"{both}.unflatten(-1, (2, {n})).unbind(-2)",
            "unflatten interleaved": f"{both}.unflatten(-1, ({n}, 2)).unbind(-1)",
        }
        parts = f"{gate}, {up}" if self.chance(0.8) else f"{up}, {gate}"
        body.append(Statement(f"{parts} = {self.pick(forms)}"))
        self.hazard(body, rows, self.random.choice((both, gate, up)))
        return self.activation(body, gate, up, n)

    def activation(self, body: list[Statement], gate: str, up: str, n: int) -> str:
        h = self.name("h", n)
        forms = {
            "silu * up": f"{h} = F.silu({gate}) * {up}",
            "up * silu": f"{h} = {up} * F.silu({gate})",
            "torch.mul": f"{h} = torch.mul(F.silu({gate}), {up})",
            "mul method": f"{h} = F.silu({gate}).mul({up})",
            "separate silu": f"a = F.silu({gate})\n{h} = a * {up}",
        }
        rare = {
            "sigmoid": f"{h} = {gate}.sigmoid() * {gate} * {up}",
            "gelu": f"{h} = F.gelu({gate}) * {up}",
            "mul_": f"{h} = F.silu({gate}).mul_({up})",
            "in-place silu": f"{h} = F.silu({gate} + 0.0, inplace=True) * {up}",
            "factor": f"{h} = F.silu({gate}) * {up} * s",
        }
        if "out=" in self.hazards and self.use("out="):
            buffer = self.name("buffer", n)
            body.append(Statement(f"{buffer} = torch.zeros_like({gate})"))
            out = f"torch.mul(F.silu({gate}), {up}, out={buffer})"
            text = f"{h} = {out}" if self.chance(0.5) else f"{out}\n{h} = {buffer}"
            body.append(Statement("with torch.no_grad():", [Statement(text)]))
        else:
            body.append(Statement(self.pick(rare) if self.chance(0.2) else self.pick(forms)))
        if self.chance(0.15):
            body.append(Statement(f"out.append({self.random.choice((gate, up))})"))
            self.program.features.add("third consumer")
        return h

    def pointwise(self, body: list[Statement], rows: str) -> str:
        others = [name for name, width in self.widths.items() if width == self.widths[rows] and name != rows]
        out = self.name("r", self.widths[rows])
        forms = {
            "times s": f"{rows} * s",
            "silu": f"F.silu({rows})",
            "clone": f"{rows}.clone()",
            "halved": f"{rows} * 0.5",
            "router": f"{rows} * s.float().sigmoid().to({rows}.dtype)",
            "alias": self.random.choice((f"{rows}[:]", f"{rows}.contiguous()", f"{rows}.view_as({rows})")),
            "no-op cast": self.random.choice((f"{rows}.to(torch.bfloat16)", f"{rows}.bfloat16()")),
            "reshaped": f"{rows}.reshape(-1, 8).view(-1, {self.widths[rows]})",
        }
        if others and not self.nested:
            forms["sum"] = f"{rows} + {self.random.choice(others)}"
        body.append(Statement(f"{out} = {self.pick(forms)}"))
        return out

    def grad_mode(self, body: list[Statement], rows: str) -> str:
        if {"no_grad", "enable_grad", "set_grad_enabled"} <= self.disabled:
            return self.plain(body, rows)
        inner: list[Statement] = []
        out = self.segment(inner, rows)
        body.append(Statement(self.mode(), inner))
        return out

    def mode(self) -> str:
        return self.pick(
            {
                "no_grad": "with torch.no_grad():",
                "enable_grad": "with torch.enable_grad():",
                "set_grad_enabled": f"with torch.set_grad_enabled({self.chance(0.5)}):",
            }
        )

    def function_body(self, rows: str) -> tuple[list[Statement], int]:
        """The statements of a function of rows ``r`` and offsets ``o`` that returns new rows, and their width."""
        outer, self.widths, self.nested = self.widths, {"r": self.widths[rows]}, self.nested + 1
        hazards, self.hazards = self.hazards, self.hazards & {"grad modes"} if not self.hazards & {"nested"} else set()
        body: list[Statement] = []
        out = self.random.choice([self.plain, self.swiglu, self.fused_swiglu])(body, "r")
        # What only forward has.
        body = [s for s in body if not s.text.startswith("out.append")]
        for statement in body:
            statement.text = statement.text.replace(" * s", " * 2.0")
        body.append(Statement(f"return {out}"))
        width = self.widths[out]
        self.widths, self.nested, self.hazards = outer, self.nested - 1, hazards
        return body, width

    def method(self, rows: str, decorator: str = "") -> tuple[str, int]:
        body, width = self.function_body(rows)
        name = self.name("block")
        self.program.methods.append(Statement(f"{decorator}def {name}(self, r, o):", body))
        return name, width

    def checkpoint(self, body: list[Statement], rows: str) -> str:
        reentrant = self.chance(0.3) and self.use("reentrant checkpoint")
        if not reentrant and not self.use("checkpoint"):
            return self.plain(body, rows)
        name, width = self.method(rows)
        out = self.name("c", width)
        if reentrant:
            self.program.fullgraph = False
        body.append(Statement(f"{out} = checkpoint(self.{name}, {rows}, o, use_reentrant={reentrant})"))
        return out

    def cond(self, body: list[Statement], rows: str) -> str:
        if not self.use("cond"):
            return self.plain(body, rows)
        n = self.random.choice(self.sizes)
        out, names = self.name("c", n), []
        for _ in range(2):
            weight = self.weight(n, self.widths[rows])
            names.append(name := self.name("branch"))
            text = f"return {self.gemm('r', weight.read, weight.transposed)}"
            body.append(Statement(f"def {name}(r, o):", [Statement(text)]))
        body.append(Statement(f"{out} = cond(o[0] > 2, {', '.join(names)}, ({rows}, o))"))
        return out

    def autograd_function(self, body: list[Statement], rows: str) -> str:
        if not self.use("autograd.Function"):
            return self.plain(body, rows)
        weight = self.weight(self.random.choice(self.sizes), self.widths[rows], False)
        name, out = self.name("Function"), self.name("c", weight.n)
        forward = Statement(
            "def forward(ctx, r, w, o):",
            [Statement("ctx.save_for_backward(w, o)"), Statement(f"return {self.gemm('r', 'w', False)}")],
        )
        backward = Statement(
            "def backward(ctx, grad):",
            [Statement("w, o = ctx.saved_tensors"), Statement("return torch._grouped_mm(grad, w, offs=o), None, None")],
        )
        methods = [s for method in (forward, backward) for s in (Statement("@staticmethod"), method)]
        self.program.definitions.append(Statement(f"class {name}(torch.autograd.Function):", methods))
        body.append(Statement(f"{out} = {name}.apply({rows}, {weight.read}, o)"))
        return out

    def dense_experts(self, body: list[Statement], rows: str) -> str:
        """All experts on all tokens, and the router's choice in their factors: Llama 4's layer in transformers."""
        if not self.use("dense experts"):
            return self.plain(body, rows)
        k, n = self.widths[rows], self.random.choice(self.halves)
        gate_up, down = self.weight(2 * n, k, True), self.weight(k, n, True)
        logits, y = self.name("logits"), self.name("y", k)
        self.program.weights.append(
            Statement(
                f'self.register_buffer("{logits}", torch.linspace(-3, 3, 97)[torch.arange(64 * {self.experts})'
                f" * 31 % 97].view(64, {self.experts}))"
            )
        )
        gate_up_mm = f"both = torch.bmm(routed.view({self.experts}, -1, {k}), {gate_up.read})"
        lines = [
            f"values, chosen = torch.topk(self.{logits}[: x.shape[0]], {self.random.randint(1, self.experts)}, dim=1)",
            "values = values * s.float()",
            f'scores = torch.full_like(self.{logits}[: x.shape[0]], float("-inf")).scatter_(1, chosen, values)',
            "scores = torch.sigmoid(scores.float()).to(x.dtype)",
            f"routed = {rows}.repeat({self.experts}, 1) * scores.transpose(0, 1).reshape(-1, 1)",
            gate_up_mm,
            "gate, up = both.chunk(2, dim=-1)",
            f"routed = torch.bmm(up * F.silu(gate), {down.read})",
            f"{y} = routed.view(-1, {k}).reshape({self.experts}, -1, {k}).sum(dim=0)",
        ]
        for line in lines:
            body.append(Statement(line))
            if self.chance(0.3):
                self.hazard(body, rows)
        return y

    def router(self, body: list[Statement], top_k: int) -> None:
        """Statements that make weights (T, A) in the dtype of x and ids (T, A) of a router's logits; parts of it are
        changed in place or read elsewhere now and then."""
        logits, experts = self.name("logits"), self.experts
        grid = f"torch.linspace(-3, 3, 97)[torch.arange(64 * {experts}) * 31 % 97].view(64, {experts})"
        self.program.weights.append(Statement(f'self.register_buffer("{logits}", {grid})'))
        self.program.weights.append(
            Statement(f'self.register_buffer("c{logits}", torch.linspace(0.3, -0.4, {experts}))')
        )
        lines = [f"logits = self.{logits}[: x.shape[0]] * s.float()"]
        own = {"logits": "logits", "weights": "weights", "ids": "ids"}
        score = self.random.choice(("logits.softmax(-1)", "logits.sigmoid()", "torch.sigmoid(logits.float())"))
        if self.chance(0.3):
            lines += [f"weights, ids = logits.topk({top_k}, -1)"]
            sigmoid = "weights = weights.float().sigmoid()"
            # Of one expert, the gradient is 0 but for rounding.
            lines += [sigmoid if top_k == 1 else self.random.choice(("weights = weights.softmax(-1)", sigmoid))]
        else:
            own["scores"] = "scores"
            lines += [f"scores = {score}"]
            choice, biased = "scores", self.chance(0.6)
            if biased:
                bias = f"self.c{logits}"
                lines += [f"choice = {self.random.choice((f'scores + {bias}', f'{bias}[None] + scores.detach()'))}"]
                own["choice"] = choice = "choice"
            if experts == 4 and top_k <= 2 and self.chance(0.6):
                own["mask"] = "mask"
                best = self.random.choice(("topk(2, dim=-1)[0].sum(-1)", "amax(-1)"))
                fill = self.random.choice(('float("-inf")', "0.0", "-100.0"))
                lines += [
                    f"groups = {choice}.view(-1, 2, 2).{best}",
                    "mask = torch.zeros_like(groups)",
                    "mask.scatter_(1, groups.topk(1, dim=-1)[1], 1)",
                    "wide = mask.unsqueeze(-1).expand(-1, 2, 2).reshape(-1, 4)",
                    f"masked = {choice}.masked_fill(~wide.bool(), {fill})",
                ]
                choice = "masked"
            lines += [f"ids = torch.topk({choice}, {top_k}, dim=-1)[1]"]  # in the order that outputs show
            lines += [f"weights = {self.random.choice(('scores', 'scores', choice))}.gather(1, ids)"]
        divisor = self.random.choice(("", " + 1e-6", " + 0.5"))
        normalization = self.random.choice(
            ("", "weights / (weights.sum(-1, keepdim=True){})", "weights / (weights.sum(0, keepdim=True){})")
        )
        if normalization and top_k > 1:
            lines += ["weights = " + normalization.format(divisor)]
            if "sum(-1" in normalization and self.chance(0.4):
                lines[-1] = f"weights /= weights.sum(-1, keepdim=True){divisor}"
        lines += [self.random.choice(("weights = weights * 2.5", "weights = weights / 2", "pass"))]
        lines += ["weights = weights.to(x.dtype)"]
        known: set[str] = set()
        for line in lines:
            body.append(Statement(line))
            known |= {name for name in own if line.startswith((f"{name} ", f"{name},")) or f", {name} =" in line}
            if not known or not self.chance(0.06) or "nested" in self.hazards:
                continue
            name = self.random.choice(sorted(known))
            # None makes ties, of which torch.topk may take any.
            changes = ["{}.copy_({}.flip(0))"]
            if name != "ids":
                changes = ["{}.mul_(0.5)", "{}.detach().mul_(0.5)", "{}[:1] = {}[:1].flip(-1)"]
            if self.use("changed router"):
                body.append(Statement(self.random.choice(changes).format(name, name)))
        if self.chance(0.2):
            read = self.random.choice(sorted(set(own) - {"ids"}))
            body.append(Statement(f"out.append({read} * 1.0)"))

    def routed_experts(self, body: list[Statement], rows: str) -> str:
        """A router, and experts on the rows of its choice, summed per token: a whole layer."""
        if self.nested or not self.use("routed experts"):
            return self.plain(body, rows)
        top_k = self.random.randint(1, self.experts)
        k, n = self.widths[rows], self.random.choice(self.halves)
        width = k if self.chance(0.8) else self.random.choice(self.sizes)
        gate_up, down, y = self.weight(2 * n, k), self.weight(width, n), self.name("y", width)
        self.router(body, top_k)
        offsets = self.random.choice(
            (
                f"torch.histc(in_order.float(), bins={self.experts}, min=0, max={self.experts - 1})",
                f"torch.zeros({self.experts}, dtype=torch.int32, device=x.device)"
                ".scatter_add(0, flat, torch.ones_like(flat, dtype=torch.int32))",
            )
        )
        both = self.gemm("r", gate_up.read, gate_up.transposed, "ends")
        on_input = self.chance(0.3)
        weighted = "tokens[order // {}] * weights.reshape(-1)[order][:, None]" if on_input else "tokens[order // {}]"
        lines = [
            f"tokens = {rows} * 1.0",
            "flat = ids.reshape(-1)",
            "in_order, order = torch.sort(flat)",
            f"ends = torch.cumsum({offsets}, dim=0, dtype=torch.int32)",
            f"r = {weighted.format(top_k)}",
            f"both = {both}",
            "gate, up = both.chunk(2, -1)",
            "h = F.silu(gate) * up",
            f"y = {self.gemm('h', down.read, down.transposed, 'ends')}",
            "pass" if on_input else "y = y * weights.reshape(-1)[order].unsqueeze(-1)",
            "inverse = torch.empty_like(order)",
            "inverse[order] = torch.arange(order.size(0), device=x.device)",
            f"{y} = y[inverse].view(-1, {top_k}, {width}).sum(dim=1)",
        ]
        known = {"weights"}
        for line in lines:
            body.append(Statement(line))
            known |= {"tokens", "order", "y"} & set(line.split(" = ")[0].split(", "))
            if self.chance(0.03) and self.use("changed routing"):
                name = self.random.choice(sorted(known))
                change = f"{name}.copy_({name}.flip(0))" if name == "order" else f"{name}.mul_(2.0)"
                body.append(Statement(change))
        return y

    def helper(self, body: list[Statement], rows: str) -> str:
        """A function of module level that takes a weight; a method, maybe of a grad mode of its own; or a break."""
        if "graph breaks" in self.hazards and self.chance(0.5) and self.use("graph break"):
            self.program.fullgraph = False
            body.append(Statement("torch._dynamo.graph_break()"))
            return rows
        if self.chance(0.5):
            weight = self.weight(self.random.choice(self.sizes), self.widths[rows])
            name, out = self.name("helper"), self.name("y", weight.n)
            text = f"return {self.gemm('r', 'w', weight.transposed)}"
            self.program.definitions.append(Statement(f"def {name}(r, w, o):", [Statement(text)]))
            body.append(Statement(f"{out} = {name}({rows}, {weight.read}, o)"))
            return out
        decorator = ""
        if "grad modes" in self.hazards and self.chance(0.5) and self.use("decorated"):
            decorator = self.random.choice(("@torch.no_grad()\n", "@torch.enable_grad()\n"))
        name, width = self.method(rows, decorator)
        out = self.name("y", width)
        body.append(Statement(f"{out} = self.{name}({rows}, o)"))
        return out

    # ---- hazards

    def hazard(self, body: list[Statement], rows: str, intermediate: str | None = None) -> None:
        """Appends, or does not, a change in place of rows, offsets, an intermediate result or a weight."""
        kinds = sorted(self.hazards & {"rows", "offsets", "weights", "intermediates"})
        if not kinds or self.chance(0.5):
            return
        kind = self.random.choice(kinds)
        if kind == "offsets" and self.use("changed offsets"):
            forms = {
                "offsets copy_": "o.copy_(p)",
                "offsets setitem": "o[:] = p",
                "offsets slice": "o[:-1] = p[:-1]",
                "offsets assigned": "o = p",
                "offsets add_": "o.add_(p - o)",
                "offsets out=": "torch.add(p, 0, out=o)",
            }
            body.append(Statement(self.pick(forms)))
        elif kind == "weights" and self.weights and self.use("changed weights"):
            weight = self.random.choice(self.weights)
            change = Statement(self.change(weight.read, weight))
            flat = f"self.flat{weight.name[1:]}"
            if any(flat in statement.text for statement in self.program.weights) and self.use("weight flat"):
                change = Statement(f"{flat}.mul_(-1.0)")
            body.append(Statement("with torch.no_grad():", [change]) if self.chance(0.8) else change)
        elif kind in ("rows", "intermediates"):
            name = rows if kind == "rows" else intermediate
            if name is None or not self.use(f"changed {kind}"):
                return
            forms = {
                "mul_": f"{name}.mul_(-2.0)",
                "zero_": f"{name}.zero_()",
                "row zero_": f"{name}[:1].zero_()",
                "setitem": f"{name}[:, :8] = 1.0",
                "copy_": f"{name}.copy_({name}.flip(0))",
                "augmented": f"{name} *= 2.0",
                "view": f"{name}.view(-1).add_(1.0)",
                "detach mul_": f"{name}.detach().mul_(2.0)",
                "foreach": f"torch._foreach_mul_([{name}], -2.0)",
                "out=": f"with torch.no_grad():\n    torch.mul({name}, 2.0, out={name})",
                "relu_": f"F.relu({name}, inplace=True)",
                "torch.relu_": f"torch.relu_({name})",
                "aten": f"torch.ops.aten.mul_({name}, 2.0)",
                "Tensor.mul_": f"torch.Tensor.mul_({name}, 2.0)",
                "transposed": f"{name}.t().mul_(2.0)",
                "split": f"for part in {name}.split(8, -1):\n    part.mul_(-2.0)",
                "masked_fill_": f"{name}.masked_fill_({name} > 0, 2.0)",
                "foreach copy": f"torch._foreach_copy_([{name}], [{name} * -2.0])",
                "index_add_": f"{name}.index_add_(1, torch.arange(8, device=x.device), {name}[:, 8:16].clone())",
                "early alias": "early.mul_(2.0)",
            }
            form = self.pick(forms)
            if form.startswith("early"):  # a view that was taken before the GEMMs
                body.insert(
                    self.random.randint(self.defined(body, name), len(body)), Statement(f"early = {name}[:, :8]")
                )
            body.append(Statement(form))

    @staticmethod
    def defined(body: list[Statement], name: str) -> int:
        """The place in a body after the statement that defines a name, its start when none does."""
        places = [
            number
            for number, statement in enumerate(body, 1)
            if any(name in line.partition(" = ")[0] for line in statement.lines() if " = " in line)
        ]
        return places[-1] if places else 0

    def change(self, w: str, weight: Weight) -> str:
        """A change in place of a weight that an expression reads, which keeps it exact."""
        return self.pick(self.changes(w, weight))

    def changes(self, w: str, weight: Weight) -> dict[str, str]:
        return {
            "weight mul_": f"{w}.mul_(-2.0)",
            "weight neg_": f"{w}.neg_()",
            "weight row mul_": f"{w}{weight.row}.mul_(2.0)",
            "weight expert neg_": f"{w}[0].neg_()",
            "weight add_": f"{w}{weight.row}.add_({w}{weight.row})",
            "weight setitem": f"{w}[0] = -{w}[1]",
            "weight view copy_": f"{w}.view(-1).copy_(-2.0 * {w}.reshape(-1))",
            "weight copy_": f"{w}.copy_({w}.flip(0))",
            "weight detach mul_": f"{w}.detach().mul_(2.0)",
            "weight mT mul_": f"{w}.mT.mul_(-1.0)",
            "weight foreach": f"torch._foreach_mul_([{w}], 2.0)",
            "weight out=": f"torch.mul({w}, -1.0, out={w})",
            "weight zero_": f"{w}{weight.row}.zero_()",
            "weight aten": f"torch.ops.aten.mul_({w}, -2.0)",
            "weight unbind": f"for expert in {w}.unbind(0):\n    expert.mul_(-1.0)",
            "weight alias": f"alias = {w}.view_as({w})[1:]\nalias.neg_()",
            "weight foreach copy": f"torch._foreach_copy_([{w}], [{w} * -2.0])",
            "weight fill": f"{w}[0].fill_(0.0)",
        }

    # ---- calls and updates

    def drive(self) -> None:
        steps = self.program.steps
        counts = [self.rows(), self.rows()]
        modes = ["no_grad", "no_grad", "train", "frozen inputs"]
        if self.use("inference"):
            modes.append("inference")
        mode = self.random.choice(modes)
        varied = self.program.dynamic or self.chance(0.1)
        # Of a row of the inputs each has its own memory, unless:
        inputs = ("view", "one tensor of offsets", "expanded factor")
        for number in range(self.random.randint(2, 5)):
            if number and self.chance(0.7):
                self.update()
            elif number and "train" in mode:
                self.unseen_update()
            mode = self.random.choice(modes) if self.chance(0.6) else mode
            rows = self.rows() if varied else counts[self.chance(0.15)]
            form = self.random.choice(inputs) if self.chance(0.1) else ""
            given = f', inputs="{form}"' if form and self.use(form) else ""
            steps.append(Statement(f'run.call("{mode}", {self.shuffled(rows)}, {number}{given})'))

    def unseen_update(self) -> None:
        """A change that leaves no trace, of a weight that has just been trained: seen all the same."""
        trained = [weight for weight in self.weights if not weight.frozen and weight.name.startswith(("w", "k"))]
        plain = not self.hazards & {"grad modes", "nested", "weights"}
        toggled = {"requires_grad toggled", "detach"} & self.program.features
        if trained and plain and not toggled and self.use("data update after training"):
            name = self.random.choice(trained).name
            self.program.steps.append(Statement(f"m.{name}.data.mul_({self.random.choice((2.0, -1.0))})"))

    def other_module(self) -> None:
        """Has some programs go on with another module of their class; two weights of the first may share memory, which
        those of the other do not."""
        chosen, steps = random.Random(f"other module {self.program.seed}"), self.program.steps
        if chosen.random() > 0.2:
            return
        copied = chosen.random() < 0.3
        self.program.features.add("copied module" if copied else "other module")
        steps.insert(chosen.randrange(1, len(steps)), Statement(f"m = run.other({'copied=True' if copied else ''})"))
        pairs = [
            (a, b) for a, b in itertools.combinations(self.weights, 2)
            if (a.n, a.k, a.transposed) == (b.n, b.k, b.transposed)
        ]  # fmt: skip
        changed = any("run." not in step.text for step in steps)  # which no version of the second one tells
        if pairs and not changed and "weights" not in self.hazards and "flat buffer" not in self.program.features:
            first, second = chosen.choice(pairs)
            steps.insert(0, Statement(f"m.{second.name}.data = m.{first.name}.data"))
            self.program.features.add("shared memory")

    def rows(self) -> tuple[int, ...]:
        kind = self.random.choice(("ragged", "ragged", "even", "one expert", "one row"))
        if kind == "even":
            return (self.random.randint(1, 6),) * self.experts
        if kind in ("one expert", "one row"):
            return (*(0,) * (self.experts - 1), 1 if kind == "one row" else self.random.randint(2, 12))
        return tuple(self.random.choice((0, 1, 2, 3, 5, 8)) for _ in range(self.experts - 1)) + (4,)

    def shuffled(self, rows: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.random.sample(rows, len(rows)))

    def update(self) -> None:
        weight = self.random.choice(self.weights)
        w, factor = f"m.{weight.name}", self.random.choice((2.0, 0.5, -1.0, -2.0))
        optimizer = self.random.choice(("SGD", "Adam", "AdamW", "Adagrad", "RMSprop"))
        option = self.random.choice(("", ", foreach=True", ", foreach=False"))
        change = self.random.choice(list(self.changes(w, weight).values()))
        forms = {
            "in-place update": "\n".join(Statement("with torch.no_grad():", [Statement(change)]).lines()),
            "update under inference_mode": f"with torch.inference_mode():\n    {w}.mul_({factor})",
            "assigned data": f"{w}.data = {w}.data * {factor}",
            "swapped data": f"new = {w}.data * {factor}\n{w}.data = new.new_empty(0)\n{w}.data = new.clone()",
            "optimizer": f'run.step("{optimizer}", {w}, factor={factor}{option})',
            "requires_grad toggled": f"{w}.requires_grad_(not {w}.requires_grad)",
            "load_state_dict": f"run.load({factor})",
            "data update": f"{w}.data.mul_({factor})\nrun.refresh(m)",
            "numpy update": f"{w}.data.view(torch.int16).numpy()[...] ^= -32768\nrun.refresh(m)",
            "garbage collection": "gc.collect()",
            "refresh_": "run.refresh(m)",
            "vector_to_parameters": "nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(m.parameters())"
            f" * {factor}, m.parameters())",
        }
        if "vector_to_parameters" not in self.program.features:  # else it is the storage of all
            new = f"({w}.data * {factor}).untyped_storage()"
            forms["storage update"] = f"{w}.data.untyped_storage().copy_({new})\nrun.refresh(m)"
        new = f"nn.Parameter({w}.detach() * {factor}, requires_grad={w}.requires_grad)"
        forms["swapped tensors"] = (
            f"torch.utils.swap_tensors({w}, {new} if isinstance({w}, nn.Parameter) else {w} * {factor})"
        )
        if not {"routed experts", "dense experts"} & self.program.features:  # whose logits get ties in bfloat16
            forms["module to"] = "m.to(torch.float64).to(torch.bfloat16)"
        blocks = [weight.name.partition("[")[0] for weight in self.weights if weight.name.startswith("b")]
        if blocks:
            block = self.random.choice(blocks)
            forms["exchanged blocks"] = f"m.{block}[0], m.{block}[1] = m.{block}[1], m.{block}[0]"
            forms["loaded block"] = f"m.{block}[0].load_state_dict(m.{block}[1].state_dict())"
        modules = [weight for weight in self.weights if weight.name.startswith("s")]
        if modules:
            parent = self.random.choice(modules).name.partition(".")[0]
            forms["new submodule"] = (
                f"m.{parent} = copy.deepcopy(m.{parent})\nfor parameter in m.{parent}.parameters():\n"
                f"    parameter.data = parameter.data * {factor}"
            )
        if weight.name.startswith("l"):
            forms["new list item"] = f"{w} = {new}"
        if "reentrant checkpoint" in self.program.features:
            # Dynamo makes another kind of checkpoint of it: a thawed weight gets a gradient, which eager execution does
            # not compute while no input requires one. Dynamo before torch 2.13 does so only if it compiles again.
            del forms["requires_grad toggled"]
        fused = self.random.choice(
            ("Adam", "AdamW", "Adagrad")
        )  # of SGD, torch 2.13's does nothing to bfloat16 on a CPU
        if not weight.name.startswith("l"):
            parent, _, name = weight.name.rpartition(".")
            forms["new parameter"] = (
                f'setattr(m{parent and "." + parent}, "{name}", nn.Parameter({w}.detach() * {factor},'
                f" requires_grad={w}.requires_grad))"
            )
        forms["fused optimizer"] = f'run.step("{fused}", {w}, factor={factor}, fused=True)'
        forms["load_state_dict(assign=True)"] = f"run.load({factor}, assign=True)"
        forms["swap_tensors"] = f"run.load({factor}, swap=True)"
        if any("flat" in s.text for s in self.program.weights):
            flat = next(s.text.split(" =")[0] for s in self.program.weights if "flat" in s.text).replace("self", "m")
            forms["flat buffer update"] = f"with torch.no_grad():\n    {flat}.mul_({factor})"
        self.program.steps.append(Statement(self.pick(forms)))


def generate(seed: int, disabled: frozenset[str] = frozenset()) -> Program:
    """The program of a seed, without some features."""
    return Generator(seed, disabled).generate()
