"""`NVFP4Linear`, the 4-bit (or MXFP8) form of nn.Linear, and the modules of linears whose weights are stacked in one.
Called by users, quantization, finetune and integrations.huggingface; calls the operator of ops.scaled_mm.

Legend: ... any leading dimensions, N out_features, K in_features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from thunder_moe.formats.block_format import NVFP4
from thunder_moe.formats.layouts import LINEAR, block_shapes
from thunder_moe.formats.weight import PackedWeight
from thunder_moe.kernels.select import chosen_backend, lay_out, quantize
from thunder_moe.nn.adaptable import AdaptableLinear
from thunder_moe.nn.packed import PackedModule
from thunder_moe.ops import scaled_mm
from thunder_moe.ops.operator import operator_for

if TYPE_CHECKING:
    from typing_extensions import Self


class NVFP4Linear(PackedModule):
    """`torch.nn.Linear` with a frozen 4-bit (or MXFP8) weight, kept as buffers, and a 16-bit (or float32) bias.

    The names in the state dict are qdata, scale, global_scale and bias. `PackedModule` describes buffers, state dicts,
    moves and the other arguments; `from_linear` makes one.

    Args:
        weight: (1, N, K).
        bias: (N,) or None.

    Attributes:
        qdata: uint8 (N, K // 2), or blocks of it; scale: float8_e4m3fn (N, K // 16), or blocks; global_scale: float32
            () or (N,). For an MXFP8 weight float8_e4m3fn (N, K), float8_e8m0fnu (N, K // 32) and None.
            ``module.to(dtype)`` leaves them unchanged.
        bias: parameter (N,), or None.

    Raises:
        ValueError: the weight has experts, the bias does not fit it.
    """

    _of_experts = False

    @classmethod
    @torch.no_grad()
    def from_linear(
        cls, *linears: nn.Linear, pack: Callable[[Tensor], PackedWeight] = quantize, layout: str = "auto"
    ) -> Self:
        """Quantize a linear, or several that read the same rows. Weights of several are stacked, with the one global
        scale that readers of checkpoints want.

        Args:
            *linears: linears with the same in_features; all have a bias, or none has. The bias of a single linear stays
                the same parameter.
            pack: quantizes (E, N, K).
            layout: as in `quantize_`.

        Raises:
            ValueError: in_features that differ or are not a multiple of 16, a weight that cannot be quantized (NaN or
                Inf, another dtype than bfloat16, float16 and float32), some have a bias and others have none.
        """
        biases = [linear.bias for linear in linears if linear.bias is not None]
        if len(biases) not in (0, len(linears)):
            raise ValueError(f"linears: got {len(biases)} with a bias among {len(linears)}, wanted all or none")
        widths = {(linear.in_features, linear.weight.dtype) for linear in linears}
        if len(widths) > 1:
            raise ValueError(f"linears: got in_features and dtypes {sorted(map(str, widths))}, wanted the same of all")
        weights = [linear.weight.detach() for linear in linears]
        packed = pack((torch.cat(weights) if len(weights) > 1 else weights[0])[None])
        new = cls(
            lay_out(packed, layout),
            stacked_bias(biases),
            weight_dtype=[linear.weight.dtype for linear in linears],
            weight_requires_grad=[linear.weight.requires_grad for linear in linears],
            auto_layout=layout == "auto",
            part_features=[linear.out_features for linear in linears],
        )
        new.train(linears[0].training)
        return new

    def _operands(self, weight: PackedWeight) -> tuple[Tensor, ...]:
        return scaled_mm.dense_operands(weight)

    def forward(self, x: Tensor) -> Tensor:
        """Run the linear: (..., K) -> (..., N)."""
        format, layout, tensors = self.read()
        mm = operator_for("f16a_nvfp4weight_scaled_mm", format)
        return mm(x, *tensors, self.bias, layout=layout)

    def rows(self, x: Tensor, begin: int, size: int) -> Tensor:
        """Return ``self(x)[..., begin : begin + size]``; compute only these output rows if the layout stores them
        separately."""
        format, layout, (codes, scale, *others) = self.read()
        bias: Tensor | None = self.bias
        tile = self.out_features // block_shapes(*self._weight_shape, layout, format)[0][1]  # rows of a block
        if begin % tile or size % tile:
            whole: Tensor = self(x)
            return whole[..., begin : begin + size]
        bias = None if bias is None else bias.narrow(0, begin, size)
        others = [each if each.ndim == 0 else each.narrow(0, begin, size) for each in others]
        mm = operator_for("f16a_nvfp4weight_scaled_mm", format)
        tensors = codes.narrow(1, begin, size), scale.narrow(0, begin, size), *others
        return mm(x, *tensors, bias, layout=layout)

    def to_linears(self) -> list[nn.Linear]:
        """Return the 16-bit linears that it stands for, with the dequantized weights."""
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


def is_packed_dense(module: nn.Module) -> bool:
    """True for a dense layer with a packed weight of its own, or for a part of a stack of them."""
    whole = isinstance(module, NVFP4Linear) and not isinstance(module, NVFP4LinearStack)
    return whole or isinstance(module, NVFP4LinearPart)


def stacked_bias(biases: Sequence[nn.Parameter]) -> nn.Parameter | None:
    """Return the biases of linears as one, the very parameter if there is one; None without any."""
    if len(biases) < 2:
        return biases[0] if biases else None
    grads = any(bias.requires_grad for bias in biases)
    return nn.Parameter(torch.cat([bias.detach() for bias in biases]), requires_grad=grads)


class NVFP4LinearStack(NVFP4Linear):
    """Several linears that read the same rows (q, k and v; gate and up) as one, which runs once for all of them.

    It is a child of the module that had the linears; each linear there is a `NVFP4LinearPart` now. A part computes its
    own rows of the weight. If `share_in` was called with the parent, a hook runs the stack once at the start of each
    call of the parent. A part takes its columns of that result, once, if it is called with the parent's own input
    tensor and nothing has changed that tensor.

    Attributes:
        once: the hooks of `share_in`; None before its first call.
    """

    once: _OncePerCall | None = None
    _refused_in: list[str] | None = None  # the errors of a load that one of the parts has refused

    def share_in(self, parent: nn.Module) -> None:
        """Compute the parts of each call of `parent` at once.

        Args:
            parent: its forward calls each part once with its first argument, or `hidden_states`, and does not change
                it: `dense_names.READ_TOGETHER_BY` lists such classes. If another forward replaces it, the parts are
                computed one by one. `leave` removes the hooks.
        """
        if self.once is None:
            self.once = _OncePerCall(self, _forward_of(parent))
        hooks = vars(parent).setdefault("_stack_hooks", {})  # also for pickles, in which a handle keeps its id its own
        hooks[self] = (
            parent.register_forward_pre_hook(self.once, with_kwargs=True),
            parent.register_forward_hook(self.once.end, always_call=True),
        )

    def leave(self, parent: nn.Module) -> None:
        """Undo `share_in`."""
        for handle in vars(parent).get("_stack_hooks", {}).pop(self, ()):
            handle.remove()

    def _load_from_state_dict(self, *args: Any) -> None:
        if self._refused_in is args[-1]:  # the parts come first, and torch has one list of errors for each load
            return
        super()._load_from_state_dict(*args)


class _OncePerCall:
    """Forward hooks that run a stack once per call of its parent, and hold the result for the parts."""

    def __init__(self, stack: NVFP4LinearStack, forward: Callable[..., Any]) -> None:
        self.stack, self.forward = stack, forward
        # The input and its state, the output, and the parts that have not taken theirs.
        self.held: tuple[Tensor, Any, Tensor, dict[int, bool]] | None = None

    def __call__(self, parent: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Run the stack before the forward of `parent`."""
        if traced_by_thunder() or (torch.compiler.is_compiling() and torch.is_grad_enabled()):
            return  # the body of a checkpoint in a graph with gradients may not change Python objects
        x = args[0] if args else options.get("hidden_states")
        # Other hooks and another forward may change x in a way that no version tells, in inference mode for one, and
        # hooks of backward call the forward with a copy.
        alone = all(type(hook) is _OncePerCall for hook in parent._forward_pre_hooks.values())
        alone = alone and not (parent._backward_hooks or parent._backward_pre_hooks)
        alone = alone and _forward_of(parent) is self.forward
        qdata, sizes = self.stack._buffers["qdata"], self.stack._part_features
        if alone and isinstance(x, Tensor) and qdata is not None and sizes is not None and qdata.device == x.device:
            self.held = x, _state(x), self.stack(x), dict.fromkeys(range(len(sizes)), True)
        else:
            self.end()

    def end(self, *_: Any) -> None:
        """Drop what parts have not taken, after the forward, also of one that raised."""
        if not traced_by_thunder() and self.held is not None:
            self.held = None

    def take(self, x: Tensor, index: int) -> Tensor | None:
        """Return the outputs of all parts of this call for x, once for each part; None if there are none."""
        held = self.held
        if held is None or held[0] is not x or held[1] != _state(x) or not held[3].pop(index, False):
            return None
        if not held[3]:
            self.held = None  # frees the memory as early as the parts' callers do
        return held[2]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "held": None}


def _forward_of(module: nn.Module) -> Callable[..., Any]:
    """Return the function that a call of a module runs, maybe inside of a hook of accelerate's."""
    forward = vars(module).get("_old_forward" if "_hf_hook" in vars(module) else "forward")
    return type(module).forward if forward is None else getattr(forward, "__func__", forward)


def _state(x: Tensor) -> Any:
    """Return what differs in another thread, after a change of the modes, or of x in place, as far as torch tells."""
    if torch.compiler.is_compiling():
        return "compiled"
    autocast = not x.is_meta and torch.is_autocast_enabled(x.device.type)
    modes = torch.is_grad_enabled(), autocast, chosen_backend()
    return get_ident(), modes, x.requires_grad, None if x.is_inference() else x._version


class NVFP4LinearPart(AdaptableLinear):
    """One of the linears of a `NVFP4LinearStack`, which is a child of the same module and has the weights.

    Args:
        stack: the stack that it belongs to.
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
    def weight_dtypes(self) -> tuple[torch.dtype]:
        """Return the dtype of the 16-bit weight that it stands for, as `PackedModule.weight_dtypes`."""
        return (self.stack.weight_dtypes[self.index],)

    @property
    def _rows(self) -> slice:
        """Return its rows within the stacked weight."""
        sizes = self.stack._part_features
        assert sizes is not None
        return slice(begin := sum(sizes[: self.index]), begin + self.out_features)

    @property
    def packed_weight(self) -> PackedWeight:
        """Return its weight (1, N, K) in layout "linear", a view of the stack's where that has this layout."""
        return lay_out(self.stack.packed_weight, LINEAR).rows(self._rows)

    @property
    def bias(self) -> Tensor | None:
        """Return its bias (N,), a view of the stack's, or None."""
        return None if self.stack.bias is None else self.stack.bias[self._rows]

    def forward(self, x: Tensor) -> Tensor:
        """Run the linear: (..., K) -> (..., N), maybe a view of the outputs of all parts."""
        once, begin, size = self.stack.once, self._rows.start, self.out_features
        if (self._forward_hooks or self._forward_pre_hooks) and once is not None:
            once.end()  # they may have changed x
        shared = None if once is None else once.take(x, self.index)
        return self.stack.rows(x, begin, size) if shared is None else shared.narrow(-1, begin, size)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, part {self.index} of a stack"

    def _get_name(self) -> str:
        return type(self).__name__.replace(NVFP4.name.upper(), self.stack.format_name.upper())


def traced_by_thunder() -> bool:
    """Return False; compilers.thunder.executor has a lookaside for it that returns True."""
    return False
