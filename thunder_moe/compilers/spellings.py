"""The spellings of torch's operations that matchers look for, as one table, and the parts of a SwiGLU.
Called by routers.py, swiglu.py, and the matchers of dynamo/ and thunder/; calls ops/, for its operators.

A matcher asks for the kind of an operation and for its arguments by name, however a program spells them:

    torch.topk(x, 2), x.topk(k=2, dim=-1), aten.topk(x, 2), Thunder's symbol topk      "topk", {input, k, ...}

A new spelling is a row with a comment on the model that has it, and a program that tests trace by both compilers:
docs/design.md shows one.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from thunder_moe.ops import activation, grouped_linear  # noqa: F401  (registers the operators)

aten = torch.ops.aten
_OPS = torch.ops.thunder_moe


@dataclass(frozen=True)
class Spelling:
    """One signature of a kind of operation, and the functions that have it."""

    kind: str  # the name by which matchers know the operation; a kind may have several signatures
    # Names by position; names behind "*" are keyword-only. "..." ignores others: the result tells what matters.
    arguments: str
    methods: str = ""  # methods of torch.Tensor; torch's functions and Thunder's symbols of these names count, too
    names: str = ""  # functions and symbols that are not methods of torch.Tensor, or whose method has another signature
    functions: tuple[Callable[..., Any], ...] = ()  # functions with other names

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the arguments of a call that are not None, by name, in order; None if the call has an argument that
        the signature lacks."""
        positional, _, keywords = (part.replace("...", "").split() for part in self.arguments.partition("*"))
        more = args[len(positional) :]
        named = {k: v for k, v in zip(positional, args, strict=False) if v is not None or k == "index"}  # x[None]
        named |= {_ALIASES.get(k, k): v for k, v in kwargs.items() if v is not None}
        if type(named.get("alpha")) is int and named["alpha"] == 1:
            del named["alpha"]
        unknown = named.keys() - {*positional, *keywords}
        ignored = "..." in self.arguments and "out" not in unknown
        if positional[0] not in named or not (ignored or (not unknown and all(value is None for value in more))):
            return None
        return {name: named[name] for name in (*positional, *keywords) if name in named}

    def targets(self) -> Iterator[Any]:
        """Yield what a node of an FX graph calls."""
        yield from (*self.functions, *self.methods.split())
        yield from (function.default for function in self.functions if hasattr(function, "default"))
        for name in (*self.methods.split(), *self.names.split()):
            found = (getattr(home, name, None) for home in (torch, F))
            yield from (function for function in found if callable(function))
            if hasattr(getattr(aten, name, None), "default"):
                yield getattr(aten, name).default


# Other names of arguments, in torch's functions and operators, in Thunder's symbols and in operators of ours.
_ALIASES = dict(self="input", a="input", tensor="input", tensors="input", b="other", pred="condition", axis="dim")
_ALIASES |= dict(src="value", source="value")
_ALIASES |= dict(axis0="dim0", axis1="dim1", keepdims="keepdim", split_size_or_sections="split_size")
_ALIASES |= dict(x="mat_a", y="mat_a", offsets="offs")
_GEMM, _FORM = "mat_a weight offs", "kind alpha limit up_shift interleave"

_TABLE = (
    # Scores and choices of experts; of transformers 5.24: deepseek_v3 has scatter_, masked_fill and "not", deepseek_v2
    # max, ernie4_5_moe clamp, granitemoe type_as
    Spelling("softmax", "input dim dtype", "softmax", "_softmax", (aten.softmax.int,)),
    Spelling("softmax", "input dim _stacklevel dtype", functions=(F.softmax,)),
    # no model of transformers 5.24 has this one: the example of docs/design.md
    Spelling("softmax", "input dim * dtype", functions=(torch.special.softmax,)),
    Spelling("sigmoid", "input", "sigmoid", functions=(torch.special.expit,)),
    Spelling("topk", "input k dim largest sorted", "topk"),
    Spelling("max", "input dim keepdim", "max amax", "torch_max", (aten.max.dim,)),
    Spelling("gather", "input dim index", "gather"),
    Spelling("masked_fill", "input mask value", "masked_fill", functions=(aten.masked_fill.Scalar,)),
    Spelling("masked_fill", "input mask value", "masked_fill_", functions=(aten.masked_fill_.Scalar,)),
    Spelling("not", "input", "bitwise_not logical_not", functions=(operator.invert, operator.inv)),
    Spelling("at_least", "input other", "ge", functions=(operator.ge, aten.ge.Scalar)),
    Spelling("clamp", "input min max", "clamp clamp_"),
    Spelling("clamp", "input min", "clamp_min"),
    # Sorts and counts of rows: integrations/moe.py of transformers 5.24 has sort and histc
    Spelling("sort", "input dim descending * stable", "sort", functions=(aten.sort.stable,)),
    Spelling("argsort", "input dim descending * stable", "argsort", functions=(aten.argsort.stable,)),
    Spelling("scatter", "input dim index value", "scatter", functions=(aten.scatter.value, aten.scatter.src)),
    Spelling("scatter", "input dim index value", "scatter_", functions=(aten.scatter_.value,)),
    Spelling("scatter_add", "input dim index value", "scatter_add scatter_add_"),
    Spelling("setitem", "input index value", functions=(operator.setitem,)),
    Spelling("index_select", "input dim index", "index_select"),
    Spelling("cumsum", "input dim * dtype", "cumsum"),
    Spelling("histc", "input bins min max", "histc"),
    Spelling("bincount", "input weights minlength", "bincount"),
    Spelling("arange", "end * device dtype", "", "arange"),
    Spelling("zeros", "input ...", "new_zeros", "zeros_like zeros"),
    Spelling("empty", "input ...", "new_empty", "empty_like empty"),
    Spelling("ones", "input ...", "new_ones", "ones_like ones"),
    Spelling("full", "input size fill_value ...", "new_full"),
    Spelling("full_like", "input fill_value ...", "", "full_like"),
    # Arithmetic
    Spelling("add", "input other", "add add_", functions=(operator.add, operator.iadd, aten.add.Tensor)),
    Spelling("mul", "input other", "mul mul_", functions=(operator.mul, operator.imul, aten.mul.Tensor)),
    Spelling("div", "input other", "div div_ true_divide true_divide_", functions=(aten.div.Tensor,)),
    Spelling("div", "input other", functions=(operator.truediv, operator.itruediv)),
    Spelling("floor_divide", "input other", "floor_divide", functions=(operator.floordiv,)),
    Spelling("sum", "input dim keepdim dtype", "sum", functions=(aten.sum.dim_IntList,)),
    Spelling("silu", "input inplace", "", "silu"),
    Spelling("bmm", "input mat2", "bmm"),
    # Norms, rotary embeddings and caches in front of attention: qwen3_moe of transformers 5.24
    Spelling("pow", "input exponent", "pow"),
    Spelling("mean", "input dim keepdim * dtype", "mean"),
    Spelling("rsqrt", "input", "rsqrt"),
    Spelling("neg", "input", "neg", functions=(operator.neg,)),
    Spelling("cat", "input dim", "", "cat"),
    Spelling("index_copy", "input dim index value", "index_copy_"),
    # Casts and views, for `keeps_order` too; llama4 of transformers 5.24 has repeat and transpose
    Spelling("cast", "input ...", "to type type_as float half bfloat16 bool", "torch_type", (aten._to_copy.default,)),
    Spelling("cast", "input ...", "int long double"),
    Spelling("detach", "input", "detach"),
    Spelling("view", "input ...", "view reshape flatten unflatten contiguous"),
    Spelling("unsqueeze", "input dim", "unsqueeze"),
    Spelling("squeeze", "input dim", "squeeze", functions=(aten.squeeze.dim,)),
    Spelling("getitem", "input index", "", "getitem", (operator.getitem,)),
    Spelling("expand", "input ...", "expand expand_as"),
    Spelling("repeat", "input ...", "repeat"),
    Spelling("repeat_interleave", "input repeats dim", "repeat_interleave", "", (aten.repeat_interleave.self_int,)),
    Spelling("transpose", "input dim0 dim1", "transpose swapaxes swapdims", functions=(aten.transpose.int,)),
    Spelling("t", "input", "t"),
    Spelling("chunk", "input chunks dim", "chunk"),
    Spelling("split", "input split_size dim", "split", functions=(aten.split.Tensor,)),
    # GEMMs of experts (torch's have the weight (E, K, N), training blocks have (E, N, K)), and attention
    Spelling("grouped_mm", "mat_a mat_b offs bias out_dtype", "", "_grouped_mm grouped_mm", (aten._grouped_mm,)),
    Spelling("linear", f"{_GEMM} bias bias_scale recipe", functions=(_OPS.grouped_linear,)),
    Spelling("activated", f"{_GEMM} scales bias recipe * {_FORM}", functions=(_OPS.activated_grouped_linear,)),
    Spelling("activation", f"mat_a scales offs * {_FORM}", functions=(_OPS.scaled_activation,)),
    Spelling(
        "attention", "query key value attn_mask dropout_p is_causal scale enable_gqa", "",
        "scaled_dot_product_attention",
    ),
)  # fmt: skip

# The target of an FX node, or the name of one of Thunder's symbols -> its row.
TARGETS: dict[Any, Spelling] = {target: row for row in _TABLE for target in row.targets()}
SYMBOLS = {name: row for row in _TABLE for name in (*row.methods.split(), *row.names.split())}
# The targets that change their first argument.
IN_PLACE = {operator.iadd, operator.imul, operator.itruediv, operator.setitem} | {
    target for target in TARGETS if str(getattr(target, "__name__", target)).split(".")[0].endswith("_")
}


class Operations(Protocol):
    """A program as tensors and the operations between them, each a hashable object of the compiler's."""

    def maker(self, tensor: Any) -> Any:
        """Return the operation that a tensor is a result of; None for an input of the program."""

    def kind(self, operation: Any) -> str:
        """Return the kind of an operation in the table, "" for all others."""

    def given(self, operation: Any) -> dict[str, Any]:
        """Return the arguments of an operation by name."""


def keeps_order(kind: str, arguments: Mapping[str, Any]) -> bool:
    """True if an operation gives all elements of its input in their order, in another shape."""
    index = arguments.get("index")
    parts = index if isinstance(index, tuple) else (index,)
    whole = (part is None or part is ... or (isinstance(part, slice) and part == slice(None)) for part in parts)
    return kind in ("view", "unsqueeze") or (kind == "getitem" and all(whole))


def is_number(value: Any) -> bool:
    """True for a finite number of Python, which is not a truth value."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


class MismatchError(Exception):
    """Raised when a program differs from a pattern; the message says where, if a report shows it."""


def require(ok: Any, otherwise: str = "") -> None:
    """Raise MismatchError unless a condition holds."""
    if not ok:
        raise MismatchError(otherwise)


def column_part(width: Any, start: Any, stop: Any, step: Any) -> str:
    """Return which part of `width` columns a slice takes; "" for any other.

    gate, up = y.chunk(2, -1): "low" and "high"; y[..., ::2], y[..., 1::2], as in GPT-OSS: "even" and "odd".
    """
    half = width // 2
    parts = {(0, half, 1): "low", (half, width, 1): "high", (0, width, 2): "even", (1, width, 2): "odd"}
    return "" if width % 2 else parts.get((start, stop, step), "")


def is_interleaved(gate: str, up: str) -> bool | None:
    """True if two parts are interleaved gate and up, False if they are their halves, None if neither."""
    return {("low", "high"): False, ("even", "odd"): True}.get((gate, up))
