"""`NVFP4Linear`, the 4-bit (or MXFP8) form of nn.Linear, and the modules of linears whose weights are stacked in one.
Called by users, dense_linears and integrations.huggingface; calls the operator of ops.scaled_mm.

Legend: ... any leading dimensions, N out_features, K in_features.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from thunder_moe.formats.block_format import BLOCK_FORMATS, NVFP4
from thunder_moe.formats.layouts import LINEAR, block_shapes
from thunder_moe.formats.weight import NVFP4Weight, PackedWeight
from thunder_moe.kernels.select import chosen_backend, lay_out, quantize
from thunder_moe.nn.adaptable import AdaptableLinear
from thunder_moe.nn.autocast import autocast_dtype
from thunder_moe.nn.packed import NVFP4Module
from thunder_moe.ops import scaled_mm
from thunder_moe.ops.operator import is_plain_eager, name_in, operator_for

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["NVFP4Linear", "NVFP4LinearPart", "NVFP4LinearStack"]


class NVFP4Linear(NVFP4Module):
    """`torch.nn.Linear` with a frozen 4-bit (or MXFP8) weight, kept as buffers, and a 16-bit (or float32) bias.

    The names in the state dict are qdata, scale, global_scale and bias. `NVFP4Module` says how buffers, state dicts and
    moves are; `from_linear` makes one.

    Args:
        weight: (1, N, K).
        bias: (N,) or None.
        **options: weight_dtype, weight_requires_grad, auto_layout and part_features of `NVFP4Module`.

    Attributes:
        qdata: uint8 (N, K // 2), or blocks of it; scale: float8_e4m3fn (N, K // 16), or blocks; global_scale: float32
            () or (N,). Of an MXFP8 weight float8_e4m3fn (N, K), float8_e8m0fnu (N, K // 32) and None.
            ``module.to(dtype)`` leaves them as they are.
        bias: parameter (N,), or None.

    Raises:
        ValueError: the weight has experts, the bias does not fit it.
    """

    bias: nn.Parameter | None
    _of_experts = False

    def __init__(self, weight: PackedWeight, bias: Tensor | None = None, **options: Any) -> None:
        if weight.shape[0] != 1:
            raise ValueError(f"weight: got shape {weight.shape}, wanted (1, out_features, in_features)")
        super().__init__(weight, **options)
        if bias is not None and bias.shape != (self.out_features,):
            raise ValueError(f"bias: got shape {tuple(bias.shape)}, wanted {(self.out_features,)}")
        if bias is not None and not isinstance(bias, nn.Parameter):
            bias = nn.Parameter(bias.detach(), requires_grad=bias.requires_grad)
        self.register_parameter("bias", bias)

    @classmethod
    @torch.no_grad()
    def from_linear(
        cls, *linears: nn.Linear, pack: Callable[[Tensor], PackedWeight] = quantize, layout: str = "auto"
    ) -> Self:
        """The 4-bit form of a linear, or of several that read the same rows: their weights are stacked, with one global
        scale, which readers of checkpoints want.

        Args:
            *linears: of the same in_features; all with a bias, or none. One with a bias alone keeps its parameter.
            pack: quantizes (E, N, K).
            layout: as in `quantize_`.

        Raises:
            ValueError: in_features that differ or are no multiple of 16, a weight that cannot be quantized (NaN or
                Inf, another dtype than bfloat16, float16 and float32), some have a bias and others have none.
        """
        biases = [linear.bias for linear in linears if linear.bias is not None]
        if len(biases) not in (0, len(linears)):
            raise ValueError(f"linears: got {len(biases)} with a bias among {len(linears)}, wanted all or none")
        bias: Tensor | None = None
        if biases:
            bias = biases[0]
            if len(biases) > 1:
                grads = any(bias.requires_grad for bias in biases)
                bias = nn.Parameter(torch.cat([bias.detach() for bias in biases]), requires_grad=grads)
        widths = {(linear.in_features, linear.weight.dtype) for linear in linears}
        if len(widths) > 1:
            raise ValueError(f"linears: got in_features and dtypes {sorted(map(str, widths))}, wanted the same of all")
        weights = [linear.weight.detach() for linear in linears]
        packed = pack((torch.cat(weights) if len(weights) > 1 else weights[0])[None])
        new = cls(
            lay_out(packed, layout),
            bias,
            weight_dtype=[linear.weight.dtype for linear in linears],
            weight_requires_grad=[linear.weight.requires_grad for linear in linears],
            auto_layout=layout == "auto",
            part_features=[linear.out_features for linear in linears],
        )
        new.train(linears[0].training)
        return new

    @property
    def _weight_shape(self) -> tuple[int, int, int]:
        return 1, self.out_features, self.in_features

    def _operands(self, weight: PackedWeight) -> tuple[Tensor, ...]:
        return scaled_mm.dense_operands(weight)

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., N)."""
        weight, tensors = self.read()
        mm = operator_for("f16a_nvfp4weight_scaled_mm", weight.format)
        out: Tensor = mm(x, *tensors, self.bias, layout=weight.layout)
        return out

    def rows(self, x: Tensor, begin: int, size: int) -> Tensor:
        """``self(x)[..., begin : begin + size]``, of these rows of the weight alone where the layout has them apart."""
        weight, (codes, scale, *others) = self.read()
        bias: Tensor | None = self.bias
        tile = self.out_features // block_shapes(*weight.shape, weight.layout, weight.format)[0][1]  # rows of a block
        if begin % tile or size % tile:
            whole: Tensor = self(x)
            return whole[..., begin : begin + size]
        bias = None if bias is None else bias.narrow(0, begin, size)
        others = [each if each.ndim == 0 else each.narrow(0, begin, size) for each in others]
        mm = operator_for("f16a_nvfp4weight_scaled_mm", weight.format)
        tensors = codes.narrow(1, begin, size), scale.narrow(0, begin, size), *others
        out: Tensor = mm(x, *tensors, bias, layout=weight.layout)
        return out

    def to_linears(self) -> list[nn.Linear]:
        """The 16-bit linears that it stands for, with the dequantized weights."""
        weights = self.dequantized()
        sizes, linears = [weight.shape[1] for weight in weights], []
        for end, weight, grads in zip(accumulate(sizes), weights, self.weights_require_grad, strict=True):
            n = weight.shape[1]
            linear = nn.Linear(self.in_features, n, bias=False, device="meta", dtype=weight.dtype)
            linear.weight = nn.Parameter(weight[0], requires_grad=grads)
            if self.bias is not None:
                bias = self.bias
                if len(sizes) > 1:
                    bias = nn.Parameter(bias.detach()[end - n : end].clone(), requires_grad=bias.requires_grad)
                linear.bias = bias
            linears.append(linear.train(self.training))
        return linears

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, {self.format_name}" + (f", layout={self.layout!r}" if self.layout != LINEAR else "")


class NVFP4LinearStack(NVFP4Linear):
    """Several linears that read the same rows (q, k and v; gate and up) as one, which runs once for all of them.

    It is a child of the module that had the linears, where each of them is a `NVFP4LinearPart` now. The first part that
    is called computes the outputs of all, which wait for the other parts until the last one has taken its own. They are
    used only for the same, unchanged input tensor, weights and modes; for others the parts compute their own rows.
    A tensor cannot tell of all changes that there were any (not in inference mode, nor through ``x.data``): who makes
    a stack has to know that the module changes its input nowhere in between (`dense_linears.read_together` does), and
    names its class as the stack's `reader`. Parts that are called from elsewhere than that class's forward share
    nothing, nor does a part that has hooks.

    Attributes:
        reader: the class whose forward calls the parts; None: whoever calls them counts as it.
    """

    reader: type[nn.Module] | None = None
    _refused_in: list[str] | None = None  # the errors of a load that one of the parts has refused

    def __init__(self, weight: PackedWeight, bias: Tensor | None = None, **options: Any) -> None:
        self._waiting = _Waiting()
        super().__init__(weight, bias, **options)

    def set_weight(self, weight: PackedWeight) -> None:
        self._waiting.clear()
        super().set_weight(weight)

    def _load_from_state_dict(self, *args: Any) -> None:
        if self._refused_in is args[-1]:  # the parts come first, and torch has one list of errors for each load
            return
        self._waiting.clear()
        super()._load_from_state_dict(*args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._waiting.clear()
        super()._apply(fn, recurse)
        return self

    def part(self, x: Tensor, index: int, *, shared: bool = True) -> Tensor:
        """The output of one of the linears: (..., K) -> (..., its out_features), a view; `shared`: of a common call."""
        sizes = self._part_features
        assert sizes is not None
        if shared and is_plain_eager(x):
            return self._bare_part(x, index, sizes)
        begin, last = sum(sizes[:index]), index == len(sizes) - 1
        shared = shared and not traced_by_thunder() and (torch.compiler.is_compiling() or self._is_read())
        waiting = self._waiting
        latest, waiting.result = waiting.result, None
        out: Tensor
        if index == 0 and shared:
            out = self(x)
        elif shared and latest is not None and (found := _result_for(x, latest, self)) is not None:
            out = found
        else:
            return self.rows(x, begin, sizes[index])
        if not last:
            waiting.result = _remember(x, out, self)
        return out.narrow(-1, begin, sizes[index])

    def _bare_part(self, x: Tensor, index: int, sizes: tuple[int, ...]) -> Tensor:
        """Do the same where `is_plain_eager` says that modes make no difference."""
        if not self._is_read():
            return self.rows(x, sum(sizes[:index]), sizes[index])
        waiting = self._waiting
        latest, waiting.parts = waiting.parts, None
        state = _version(x), _of_tensors(self)
        parts: tuple[Tensor, ...]
        if index == 0:
            parts = self(x).split(sizes, -1)
        elif latest is not None and latest[0]() is x and latest[1] == state:
            parts = latest[2]
        else:
            return self.rows(x, sum(sizes[:index]), sizes[index])
        if index + 1 < len(sizes):
            waiting.parts = weakref.ref(x), state, parts
        return parts[index]

    def _is_read(self) -> bool:
        """Whether the reader's forward is what calls a part, below torch's and others' wrappers of the call."""
        if self.reader is None:
            return True
        reader: Any = self.reader
        code, frame = _code_of_forward(reader), sys._getframe(5).f_back  # behind two frames of nn.Module
        if frame is not None and frame.f_code is code:
            return True
        frame = sys._getframe(2)
        for _ in range(_WRAPPERS):
            if frame is None or frame.f_code is code:
                break
            frame = frame.f_back
        return frame is not None and frame.f_code is code


_WRAPPERS = 10  # frames between `part` and the forward that calls one, with those of hooks and of accelerate


@functools.cache
def _code_of_forward(kind: Any) -> Any:
    return getattr(inspect.unwrap(kind.forward), "__code__", None)


class _Waiting:
    """The result that parts wait for, beside the module, whose attributes are slow to set. A copy has no result."""

    def __init__(self) -> None:
        self.result: tuple[Any, ...] | None = None
        self.parts: tuple[Any, ...] | None = None

    def clear(self) -> None:
        self.result = self.parts = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _Waiting, ()


class NVFP4LinearPart(AdaptableLinear):
    """One of the linears of a `NVFP4LinearStack`, which is a child of the same module and has the weights.

    Args:
        stack: that it belongs to.
        index: its place among the linears of the stack.
    """

    stack: NVFP4LinearStack

    def __init__(self, stack: NVFP4LinearStack, index: int) -> None:
        super().__init__()
        self.__dict__["stack"] = stack  # no child: the tensors are in the state dict once
        self.index, self.in_features = index, stack.in_features
        assert stack._part_features is not None
        self.out_features = stack._part_features[index]

    @property
    def _rows(self) -> slice:
        """Of its own among the stack's."""
        sizes = self.stack._part_features
        assert sizes is not None
        return slice(sum(sizes[: self.index]), sum(sizes[: self.index + 1]))

    @property
    def packed_weight(self) -> PackedWeight:
        """Its weight (1, N, K) in layout "linear", a view of the stack's where that has this layout."""
        return self.stack.packed_weight.to_layout(LINEAR).rows(self._rows)

    @property
    def nvfp4_weight(self) -> NVFP4Weight:
        """The same, of a stack in NVFP4.

        Raises:
            ValueError: it is in another number format.
        """
        return self.stack.nvfp4_weight.to_layout(LINEAR).rows(self._rows)

    @property
    def bias(self) -> Tensor | None:
        """Its bias (N,), a view of the stack's, or None."""
        return None if self.stack.bias is None else self.stack.bias[self._rows]

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., N), a view of the outputs of all."""
        return self.stack.part(x, self.index, shared=not (self._forward_hooks or self._forward_pre_hooks))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, part {self.index} of a stack"

    def _get_name(self) -> str:
        return type(self).__name__.replace(NVFP4.name.upper(), self.stack.format_name.upper())


def traced_by_thunder() -> bool:
    """False; compilers.thunder.executor has a lookaside for it that is True."""
    return False


def _remember(x: Tensor, out: Tensor, stack: NVFP4LinearStack) -> tuple[Any, ...]:
    """What `_result_for` knows a result by."""
    if torch.compiler.is_compiling():
        return (x, out, _traced_input("") if torch.compiler.is_dynamo_compiling() else "")
    return (weakref.ref(x), _state(x, stack), out)


def _result_for(x: Tensor, latest: Sequence[Any], stack: NVFP4LinearStack) -> Tensor | None:
    """The result that `latest` holds, if it is that of this tensor, these weights and modes in their present state."""
    out: Tensor
    if torch.compiler.is_compiling():
        if not isinstance(latest[2], str) or latest[0] is not x:
            return None
        if torch.compiler.is_dynamo_compiling() and (latest[2] == "" or latest[2] != _traced_input(latest[2])):
            return None
        out = latest[1]
        return out
    if isinstance(latest[2], str) or latest[0]() is not x or latest[1] != _state(x, stack):
        return None
    out = latest[2]
    return out


def _state(x: Tensor, stack: NVFP4LinearStack) -> tuple[Any, ...]:
    """What a result of x depends on; weights that are loaded, set or moved drop the result themselves."""
    modes = torch.is_grad_enabled(), autocast_dtype(x), chosen_backend()
    return _version(x), *modes, _of_tensors(stack)


def _of_tensors(stack: NVFP4LinearStack) -> tuple[Any, ...]:
    """The tensors of the weight and the bias, and how often each has been written in place."""
    tensors = *stack._buffers.values(), *stack._parameters.values()  # attributes of modules are slow
    return tuple([(id(each), None if each is None else _version(each)) for each in tensors])


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


def _input_in_graph(known: str) -> str:
    """Runs while dynamo traces: what the graph's last dense layer reads, or the input that is `known`, by the graph,
    the node's name and how often the trace has changed it in place so far; "" where there is none."""
    graph = torch._dynamo.symbolic_convert.InstructionTranslator.current_tx().output.graph
    names = [name_in("f16a_nvfp4weight_scaled_mm", format) for format in BLOCK_FORMATS.values()]
    operators = [getattr(torch.ops.thunder_moe, name) for name in names]
    for node in reversed(graph.nodes):
        if node.target in (*operators, *(each.default for each in operators)):
            read = node.args[0]
            found = f"{id(graph)} {read.name} "
            if known.startswith(found) or not known:
                return f"{found}{read.meta['example_value']._version}"
    return ""


_constant: Any = torch.compiler.assume_constant_result
_traced_input: Callable[[str], str] = _constant(_input_in_graph)
