"""`GroupedLinear`: one linear map per expert, as a single grouped GEMM.
Called by users, the other modules of nn, training, quantization (through nn), parallel and integrations.huggingface;
calls the operators of ops.grouped_linear, which compilers rewrite, and ops.grouped_linear_into.

Legend: M rows sorted by expert, E experts, N out_features, K in_features. `offsets` is int32 or int64 (E,): cumulative
row ENDS, group 0 starts at row 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thunder_moe.formats.checks import require, require_type
from thunder_moe.nn.adaptable import AdaptableLinear
from thunder_moe.nn.autocast import autocast_dtype
from thunder_moe.nn.expert_states import NAMES, one_per_weight
from thunder_moe.nn.linear import traced_by_thunder
from thunder_moe.ops import grouped_linear  # noqa: F401  (registers the operators)
from thunder_moe.ops.activation import ActivationForm
from thunder_moe.ops.grouped_linear import check_recipe
from thunder_moe.ops.grouped_linear_into import Into, Queue, check_buffer, grouped_linear_into, run_waiting


class GroupedLinear(AdaptableLinear):
    """One linear map per expert: rows of expert e are multiplied by ``weight[e].T``, and get ``bias[e]``.

    Args:
        num_experts: E.
        in_features: K.
        out_features: N.
        bias: True for a bias.
        dtype: the dtype of the parameters, torch's default when None.
        device: the device of the parameters, torch's default when None.
        accumulate_into_main_grad: the gradient of a trainable weight is added to ``weight.main_grad``, a float32 tensor
            of its shape that the caller provides, without a rounding to the weight's dtype; ``weight.grad`` stays None.
            With a true ``weight.overwrite_main_grad`` it replaces the contents of main_grad. If the weight has an
            attribute ``grad_added_to_main_grad``, it is set to True, and autograd gets zeros, so that hooks fire.
        delay_wgrad: a backward keeps the rows and the gradient of its output, and `backward_dw` computes the weight's
            gradient. Biases do not wait.
        recipe: "mxfp8" or "fp8" for products of operands in 8 bits, forward and backward, for a weight in bfloat16 or
            float32 (docs/training.md has the definitions); None for products in the weight's dtype.

    Attributes:
        recipe: as above; it may be changed between calls. A ValueError for a subclass with a forward of its own.
        weight: parameter (E, N, K), initialised as `torch.nn.Linear` does: U(-K**-0.5, K**-0.5).
        bias: parameter (E, N), initialised likewise, or None.

    State dicts have ``weight`` and ``bias``; state dicts with one ``weight0``, ``bias0``, ... per expert load, too.
    Gradients that wait for `backward_dw` are not copied or pickled with the module.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    _recipe = ""  # for none, because Thunder guards the value of a string, but not None
    _sharded = False  # True if the parameters are DTensors; a rank computes with its own part

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        accumulate_into_main_grad: bool = False,
        delay_wgrad: bool = False,
        recipe: str | None = None,
    ) -> None:
        super().__init__()
        sizes = dict(num_experts=num_experts, in_features=in_features, out_features=out_features)
        for name, size in sizes.items():
            require_at_least(1, name, size)
        require_weight_dtype(dtype)
        check_recipe(recipe, torch.get_default_dtype() if dtype is None else dtype)
        self.num_experts, self.in_features, self.out_features = num_experts, in_features, out_features
        self.accumulate_into_main_grad, self.delay_wgrad = accumulate_into_main_grad, delay_wgrad
        self.recipe = recipe
        self._waiting = Queue()
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features, dtype=dtype, device=device))
        of_experts = torch.empty(num_experts, out_features, dtype=dtype, device=device) if bias else None
        self.register_parameter("bias", None if of_experts is None else nn.Parameter(of_experts))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.in_features**-0.5
        for parameter in (self.weight, self.bias):
            if parameter is not None and not parameter.is_meta:  # torch would take 0.2 ms for nothing
                nn.init.uniform_(parameter, -bound, bound)

    @property
    def recipe(self) -> str | None:
        """Return the 8-bit recipe, as the argument."""
        return self._recipe or None

    @recipe.setter
    def recipe(self, recipe: str | None) -> None:
        check_recipe(recipe, torch.float32)  # a call checks the dtype
        if recipe is not None and type(self).forward is not GroupedLinear.forward:
            raise ValueError(
                f"recipe: got {recipe!r} for {type(self).__name__}, whose own forward may not read it; wanted None, or"
                " a class with the forward of GroupedLinear"
            )
        self._recipe = recipe or ""

    def forward(
        self,
        x: Tensor,
        offsets: Tensor,
        bias_scale: Tensor | None = None,
        *,
        out: Tensor | None = None,
        grad_input: Tensor | None = None,
    ) -> Tensor:
        """Multiply (M, K) rows sorted by expert, with offsets (E,) of row ends: -> (M, N).

        Rows past ``offsets[-1]`` may hold anything: results and gradients are zero there.

        Args:
            bias_scale: floating point (M,), multiplies each row's bias.
            out: buffer (M, N) for the result, which then shares its memory; rows past the end are not written.
            grad_input: buffer (M, K) for the gradient of x, likewise; untouched if x needs no gradient.

        Raises:
            ValueError: an argument has the wrong rank, size, dtype or device; bias_scale without a bias; a buffer that
                requires a gradient, is not contiguous or overlaps an operand. On a CPU also offsets that decrease, are
                negative or exceed the rows. In the backward of a trainable weight: main_grad is missing or does not
                fit.
        """
        if out is None and grad_input is None and not self._writes():
            weight, bias = self.local_parameters()
            rows, weight = autocast(x, weight)
            return linear_operator(x)(rows, weight, offsets, bias, bias_scale, self.recipe)
        refuse_traced(self, x, out=out, grad_input=grad_input)
        result = run_into(self, x, offsets, bias_scale, out, grad_input)
        return result

    def local_parameters(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias, or this rank's parts of DTensors."""
        return local_part(self.weight, self._sharded), local_part(self.bias, self._sharded)

    def backward_dw(self) -> None:
        """Compute the oldest waiting weight gradient and add it to ``weight.grad`` or main_grad, firing the hooks of
        the parameter; do nothing if none waits.

        Raises:
            ValueError: the weight is frozen by now, or main_grad does not fit.
            RuntimeError: rows or gradient were changed in place in the meantime.
        """
        run_waiting(self._waiting, self.accumulate_into_main_grad)

    def need_backward_dw(self) -> bool:
        """True if a weight gradient waits for `backward_dw`."""
        return bool(self._waiting)

    def _writes(self) -> bool:
        """True if a backward is to write the weight's gradient elsewhere than autograd does, or later."""
        apart = self.accumulate_into_main_grad or self.delay_wgrad
        return apart and self.weight.requires_grad and torch.is_grad_enabled()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        *others: Any,
    ) -> None:
        state_dict = one_per_weight(state_dict, prefix, self, missing_keys)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *others)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | dict(_waiting=Queue())

    def extra_repr(self) -> str:
        sizes = f"num_experts={self.num_experts}, in_features={self.in_features}, out_features={self.out_features}"
        options = dict(bias=self.bias is not None, accumulate_into_main_grad=self.accumulate_into_main_grad)
        options |= dict(delay_wgrad=self.delay_wgrad)
        named = [f"{name}=True" for name, value in options.items() if value]
        return ", ".join([sizes, *named, *([] if self.recipe is None else [f"recipe={self.recipe!r}"])])


def per_expert_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a module with one tensor per expert: ``weight0``, ``bias0``, ... in place of the
    ``weight`` and ``bias`` of each `GroupedLinear` in it, as TransformerEngine names them. The tensors share the
    parameters' memory.

    Raises:
        TypeError: the argument is not a module.
    """
    require_type("module", module, nn.Module, "a torch.nn.Module")
    modules = module.named_modules(remove_duplicate=False)  # state dicts have a shared module under each of its names
    linears = {name for name, child in modules if isinstance(child, GroupedLinear)}
    state: dict[str, Tensor] = {}
    for key, tensor in module.state_dict().items():
        owner, _, name = key.rpartition(".")
        if owner in linears and name in NAMES:
            state |= {f"{key}{expert}": of_expert for expert, of_expert in enumerate(tensor)}
        else:
            state[key] = tensor
    return state


def linear_operator(x: Tensor) -> Callable[..., Tensor]:
    """Return what computes a linear: the operator, or torch's functions in traces of Thunder without moe_executor."""
    if not isinstance(x.dtype, torch.dtype) and not traced_by_thunder():
        return _linear_of_torch
    return torch.ops.thunder_moe.grouped_linear


def _linear_of_torch(
    x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, bias_scale: Tensor | None,
    recipe: str | None = None,
) -> Tensor:  # fmt: skip
    for name, given in dict(bias=bias, recipe=recipe).items():
        if given is not None:
            raise ValueError(f"{name}: got one under thunder.jit without moe_executor, wanted executors=[moe_executor]")
    return F.grouped_mm(x, weight.transpose(-2, -1), offs=offsets)


def local_part(parameter: Any, sharded: bool) -> Any:
    """Return a parameter, or this rank's part of it."""
    return parameter.to_local() if sharded and parameter is not None else parameter


def autocast(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows and weight in the dtype of autocast, if it is on."""
    dtype = autocast_dtype(x)
    return (x, weight) if dtype is None else (x.to(dtype), weight.to(dtype))


def refuse_traced(linear: GroupedLinear, x: Tensor, **buffers: Tensor | None) -> None:
    """Raise ValueError while Thunder traces: its traces cannot write into tensors of the caller."""
    if isinstance(x.dtype, torch.dtype):
        return
    given = " and ".join(_given(linear, **buffers))
    raise ValueError(f"{given}: got it under thunder.jit, which has none of it, wanted a call outside")


def _given(linear: GroupedLinear, **buffers: Tensor | None) -> list[str]:
    """Return the option that makes a call write into tensors of the caller."""
    given = [name for name, buffer in buffers.items() if buffer is not None]
    return given + [name for name in ("accumulate_into_main_grad", "delay_wgrad") if getattr(linear, name)]


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="out, grad_input, accumulate_into_main_grad and delay_wgrad write into tensors outside of the graph: such a"
    " call of GroupedLinear or GroupedMLP cannot be part of a fullgraph"
)
def run_into(
    linear: GroupedLinear,
    x: Tensor,
    offsets: Tensor,
    scales: Tensor | None,
    out: Tensor | None,
    grad_input: Tensor | None,
    form: ActivationForm | None = None,
) -> Tensor:
    """Run a linear's forward, with a `form` on activated rows; results and gradients go into tensors of the caller."""
    if linear._sharded:
        given = " and ".join(_given(linear, out=out, grad_input=grad_input))
        raise ValueError(f"{given}: got it for a weight that is cut over ranks, wanted a whole weight")
    weight, dtype = linear.weight, autocast_dtype(x)
    require(dtype is not None or x.dtype == weight.dtype, "x", x, f"dtype {weight.dtype}, as the weight has")
    require(x.ndim == 2, "x", x, f"shape (rows, in_features = {linear.in_features})")
    dtype = weight.dtype if dtype is None else dtype
    operands = {"weight": weight, "bias": linear.bias, "bias_scale" if form is None else "scales": scales}
    check_buffer("out", out, (x.shape[0], linear.out_features), dtype, x, **operands)
    check_buffer("grad_input", grad_input, tuple(x.shape), x.dtype, x, **operands)
    waiting = linear._waiting if linear.delay_wgrad else None
    into = Into(out, grad_input, linear.accumulate_into_main_grad, waiting, dtype, linear.recipe)
    return grouped_linear_into(x, weight, offsets, scales, linear.bias, into, form)


def require_weight_dtype(dtype: torch.dtype | None) -> None:
    """Raise a ValueError for a dtype that weights cannot be trained in."""
    known = dtype is None or isinstance(dtype, torch.dtype)
    if not known or (dtype is not None and not (dtype.is_floating_point and dtype.itemsize > 1)):
        raise ValueError(f"dtype: got {dtype}, wanted bfloat16, float16, float32, float64 or None for torch's default")


def require_at_least(least: int, name: str, size: int) -> None:
    """Raise a ValueError for a size that is not an integer of at least `least`."""
    if not isinstance(size, int) or isinstance(size, bool) or size < least:
        raise ValueError(f"{name}: got {size!r}, wanted an integer of at least {least}")
