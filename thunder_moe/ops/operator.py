"""`operator`: registers an operator of the namespace thunder_moe from one description of it.
Called by the other files of ops; compilers.thunder.symbols reads `OPERATORS`; calls torch.library and kernels.select.

The decorated function is the operator: its signature is the schema, its docstring the documentation, its body runs the
kernel once the checks have passed. The checks, the shape of the result and the gradient are functions of the same
arguments; each takes only the arguments that it reads.

On a fast device a call costs mostly host time. So operators are registered by torch.library's low-level functions
instead of `torch.library.custom_op`, and `Operator.__call__` bypasses the dispatcher for plain calls: dense tensors on
one device, nothing that requires a gradient, no mode or transform. On CUDA a plain call then skips the checks and runs
a chain of kernels (cuda/chain.py), prepared by an earlier call with the same shapes, strides, dtypes and devices.

A description has each packed weight as one argument, `WeightOperands`. `weight_operator` registers an operator for
each number format, whose schema has the tensors of the format's weights in its place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch._library.custom_ops import get_library_allowing_overwrite
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from thunder_moe.formats.block_format import BLOCK_FORMATS, NVFP4, BlockFormat
from thunder_moe.formats.checks import require
from thunder_moe.formats.weight import WeightOperands
from thunder_moe.kernels import chains
from thunder_moe.kernels.select import chooses_freely, has_chains, prepare
from thunder_moe.ops.checks import refuse_forward_ad, refuse_transformed_gradients, refuse_weight_gradients

P = ParamSpec("P")
R = TypeVar("R")
Shape = tuple[int, ...]
Gradients = tuple[Tensor | None, ...]
Dtypes = Callable[..., tuple[torch.dtype | None, ...]]
OPERATORS: dict[str, Operator] = {}
_MAX_RECENT = 4  # chains of an operator that are tried before one is looked up
# The types of Python whose values the dispatcher hands on unchanged, by a schema's type.
_KINDS: dict[str, tuple[type, ...]] = {
    "Tensor": (Tensor, Parameter),
    "int": (int,),
    "float": (float,),
    "bool": (bool,),
    "str": (str,),
    "ScalarType": (torch.dtype,),
}


def _no_values(*args: Any, **options: Any) -> None:
    """Accept every argument: for operators without checks of data."""


class Operator:
    """An operator of the namespace thunder_moe.

    The functions of the description take the operator's arguments with the tensors of each weight as one argument.

    Args:
        function: runs the kernel; its signature is the schema, with the tensors of a weight in place of each argument
            that is annotated as `WeightOperands`.
        shapes: the arguments -> the shapes of the results. It reads shapes alone, so that it serves tensors, fake
            tensors and the proxies of Thunder.
        check: raises ValueError for arguments that do not fit; reads no data.
        check_values: raises ValueError for data that does not fit; it reads data on a CPU only.
        dtype: the results' dtype, or a function from the arguments to it; None for the first argument's dtype.
        gradient: (grad of the first result, *saved arguments, *saved results, needs=, **options) -> the gradients of
            `differentiable` that `needs` asks for. None: the results are integers. It may raise instead.
        differentiable: the names of arguments that get a gradient.
        saved: the positions of the function's arguments that the gradient reads.
        saved_results: the positions of the results that the gradient reads.
        of_nvfp4: the names of optional arguments that operators of other formats do not have.
        format: the number format of its packed weights, if it has any.
        mutates: the names of arguments that it changes in place.

    Attributes:
        name: the name of the operator, without the namespace; the function's name has NVFP4's in it.
        signature: the signature of the operator.
        positions: the positions of the arguments named in `differentiable`.
        mutates: as above.
        public: a function that calls the operator.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        shapes: Callable[..., tuple[Shape, ...]],
        check: Callable[..., None],
        check_values: Callable[..., None] = _no_values,
        dtype: torch.dtype | Dtypes | None = None,
        gradient: Callable[..., Gradients] | None = None,
        differentiable: Sequence[str] = (),
        saved: slice = slice(None),
        saved_results: slice = slice(0),
        of_nvfp4: Sequence[str] = (),
        format: BlockFormat = NVFP4,
        mutates: Sequence[str] = (),
    ) -> None:
        self.name, self.format = op_name_for(function.__name__, format), format
        self._shapes, self._check, self._check_values, self._dtype = shapes, check, check_values, dtype
        self.differentiable, self._gradient, self._function = differentiable, gradient, function
        self._saved, self._saved_results, self.mutates = saved, saved_results, tuple(mutates)
        described = inspect.signature(function)
        flat: list[inspect.Parameter] = []
        places: list[int] = []  # of the described arguments among the operator's
        self._weights: list[tuple[slice, Callable[..., WeightOperands]]] = []  # by their places, the last one first
        self._frozen: list[tuple[str, int]] = []
        for value in described.parameters.values():
            if value.kind is not value.KEYWORD_ONLY:
                places.append(len(flat))
            if value.annotation in (WeightOperands, "WeightOperands"):
                names = format.operand_names(value.name)
                tensors = slice(len(flat), len(flat) + len(names))
                self._weights.insert(0, (tensors, partial(WeightOperands, format=format, names=names)))
                self._frozen += [(name, len(flat) + index) for index, name in enumerate(names)]
                flat += [value.replace(name=name, annotation="Tensor") for name in names]
            elif format is NVFP4 or value.name not in of_nvfp4:
                flat.append(value)
        self.signature = described.replace(parameters=flat)
        parameters = self.signature.parameters
        self._positional = [name for name, value in parameters.items() if value.kind is not value.KEYWORD_ONLY]
        defaults = {name: None if value.default is value.empty else value.default for name, value in parameters.items()}
        self._required = [parameters[name].annotation in (Tensor, "Tensor") for name in self._positional]
        self._defaults = tuple(defaults[name] for name in self._positional)
        self._options = {name: value for name, value in defaults.items() if name not in self._positional}
        self.positions = tuple(map(self._positional.index, differentiable))
        start, stop, _ = saved.indices(len(places))
        places.append(len(self._positional))
        self._saved_places = slice(places[start], places[stop])
        self._least = sum(parameters[name].default is inspect.Parameter.empty for name in self._positional)
        self._mru: tuple[Any, ...] = ()  # prepared chains, the most recently used first
        self.public = self._public()
        schema = torch.library.infer_schema(self.public, mutates_args=self.mutates)
        library, self._overload = define(self.name, schema, self._run, self._fake)
        for key in ("CPU", "CUDA"):
            library.impl(self.name, self._run_plain, key)
        kinds = {argument.name: _kinds_of(str(argument.real_type)) for argument in self._overload._schema.arguments}
        self._kinds = [kinds[name] for name in self._positional]
        self._kinds_of_options = {name: kinds[name] for name in self._options}
        self._packet = getattr(torch.ops.thunder_moe, self.name)
        self._differentiably: Callable[..., Any] | None = None
        if gradient is not None:
            self._differentiably = _autograd_function(self).apply
            library.impl(self.name, self._dispatch, "Autograd", with_keyset=True)
        OPERATORS[self.name] = self

    def _public(self) -> Callable[..., Any]:
        @wraps(self._function)
        def call(*args: Any, **options: Any) -> Any:
            try:
                return self._packet(*args, **options) if torch.compiler.is_compiling() else self(*args, **options)
            except RuntimeError:
                self.signature.bind(*args, **options)  # a TypeError for arguments that are missing or unknown
                raise

        call.__name__ = call.__qualname__ = self.name
        call.__signature__ = self.signature  # type: ignore[attr-defined]
        if self.format is not NVFP4:
            call.__doc__ = _documentation(self._function, self.format)
        return call

    def described(self, args: Sequence[Any]) -> list[Any]:
        """Return arguments as the functions of the description take them: the tensors of a weight as one argument."""
        described = list(args)
        for places, weight in self._weights if args else ():  # a gradient may read none
            described[places] = [weight(*args[places])]
        return described

    def check(self, *args: Any, **options: Any) -> list[Any]:
        """Raise the error of arguments that do not fit, as far as it can be told without data.

        Returns:
            The arguments, `described`.
        """
        for name, value, required in zip(self._positional, args, self._required, strict=False):
            if value is None and required:  # which torch takes for an undefined tensor
                raise TypeError(f"{name}: got None, wanted a tensor")
        described = self.described(args)
        self._check(*described, **options)
        return described

    def shapes(self, *args: Any, **options: Any) -> tuple[Shape, ...]:
        """Return the shapes of the results."""
        return self._shapes(*self.described(args), **options)

    def dtypes(self, *args: Any, **options: Any) -> tuple[torch.dtype | None, ...]:
        """Return the dtypes of the results; None stands for the first argument's dtype."""
        if callable(self._dtype):
            return self._dtype(*args, **options)
        return (self._dtype,) * len(self.shapes(*args, **options))

    def backward(
        self, grad: Tensor, *args: Any, results: Sequence[Tensor] = (), needs: Sequence[bool] | None = None,
        **options: Any,
    ) -> Gradients:  # fmt: skip
        """Return the gradients of `differentiable` that `needs` asks for (None: all), from the first result's gradient.

        `results` are the results that `saved_results` names.

        Raises:
            ValueError: as the operator, and for a grad that is not of its result's shape.
        """
        assert self._gradient is not None
        described = self.check(*args, *self._defaults[len(args) :], **options)
        self._check_values(*described, **options)
        shape, *_ = self._shapes(*described, **options)
        require(tuple(grad.shape) == shape, "grad", grad, f"shape {shape}")
        needs = (True,) * len(self.positions) if needs is None else needs
        return self._gradient(grad, *described[self._saved], *results, needs=needs, **options)

    def saved(self, args: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
        """Return what the gradient reads of the arguments, without options, and of the results."""
        return *args[self._saved_places], *results[self._saved_results]

    def gradients(
        self, grad: Tensor, saved: Sequence[Any], *, needs: Sequence[bool] | None = None, **options: Any
    ) -> Gradients:
        """Return the gradients of `differentiable` that `needs` asks for (None: all), from what `saved` returned."""
        assert self._gradient is not None
        described = self.described((*(None,) * self._saved_places.start, *saved))[self._saved.start :]
        needs = (True,) * len(self.positions) if needs is None else needs
        return self._gradient(grad, *described, needs=needs, **options)

    def _dispatch(self, keys: torch._C.DispatchKeySet, *args: Any, **options: Any) -> Any:
        """Run the kernel of the autograd key: the shortest way if nothing needs a gradient or another dispatch."""
        plain = _PLAIN.get(keys.raw_repr())
        if plain is None:
            plain = _is_plain(keys)
        if torch._C.is_grad_enabled() and torch._C._any_requires_grad(*args):
            assert self._differentiably is not None
            refuse_transformed_gradients()
            for name in self.mutates:
                if args[self._positional.index(name)].requires_grad:
                    raise ValueError(
                        f"{name}: got a tensor that requires grad, which {self.name} changes in place; wanted one that"
                        " does not, or a call under torch.no_grad()"
                    )
            return self._differentiably(keys, options, *args)
        if plain:
            return self._run_known(args, options)
        with torch._C._AutoDispatchBelowAutograd():
            return self._overload.redispatch(keys & torch._C._after_autograd_keyset, *args, **options)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the operator, past the dispatcher where it has nothing to do."""
        if self._least <= len(args) <= len(self._positional) and is_plain_eager(args[0]):
            for chain in self._mru:  # a chain compares every argument itself
                result = chain(*args, **options)
                if result is not None:
                    return result
            if self._are_plain(args, options):
                return self._run_kind(args, options)
        return self._packet(*args, **options)

    def _are_plain(self, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
        """True if the dispatcher would hand the arguments on unchanged; it converts others, or says what is wrong."""
        for value, kinds in zip(args, self._kinds, strict=False):
            if type(value) not in kinds:
                return False
            if isinstance(value, Tensor):
                keys = torch._C._dispatch_keys(value)
                plain = _PLAIN.get(keys.raw_repr())
                if not (_is_plain(keys) if plain is None else plain):  # a lazy negation, say
                    return False
        return all(type(value) in self._kinds_of_options.get(name, ()) for name, value in options.items())

    def _run_plain(self, *args: Any, **options: Any) -> Any:
        """Run the kernel of the keys of dense tensors on a CPU and on CUDA devices."""
        return self._run_known(args, options)

    def _run_known(self, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Run `_run`, on CUDA by the chain that an earlier call with arguments of this kind has prepared."""
        if forward_ad._current_level >= 0 or not chooses_freely():
            return self._run(*args, **options)
        for chain in self._mru:
            result = chain(*args, **options)
            if result is not None:
                return result
        return self._run_kind(args, options)

    def _run_kind(self, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Run by the chain for arguments of this kind, which their first call prepares."""
        if not isinstance(args[0], Tensor) or not has_chains(args[0].device):
            return self._run(*args, **options)
        kind = chains.kind_of(self.name, args, options, self._options)
        chain = chains.find(kind)
        if chain is chains.UNKNOWN:
            result = self._run(*args, **options)
            prepare(self.name, self.described(args), options, self.format.name, kind)
            return result
        if chain is None:
            return self._compute(*self.described(args), **options)
        self._mru = (chain, *[other for other in self._mru if other is not chain][: _MAX_RECENT - 1])
        result = chain(*args, **options)
        # The chain may return None, for example for another alignment.
        return self._compute(*self.described(args), **options) if result is None else result

    def _run(self, *args: Any, **options: Any) -> Any:
        if self._differentiably is not None:
            refuse_forward_ad()
        described = self.check(*args, **options)
        self._check_values(*described, **options)
        return self._compute(*described, **options)

    def _compute(self, *args: Any, **options: Any) -> Any:
        """Return the function's results, never views: autograd forbids in-place changes of views made by a kernel."""
        results = self._function(*args, **options)
        return tuple(map(_no_view, results)) if isinstance(results, tuple) else _no_view(results)

    def _fake(self, *args: Any, **options: Any) -> Any:
        shapes = self._shapes(*self.check(*args, **options), **options)
        described = zip(shapes, self.dtypes(*args, **options), strict=True)
        results = tuple(args[0].new_empty(shape, dtype=dtype) for shape, dtype in described)
        return results if len(results) > 1 else results[0]

    def _save(self, ctx: Any, args: tuple[Any, ...], options: dict[str, Any], results: Any) -> None:
        """Keeps for the gradient what it reads; the dispatcher leaves out arguments that have their defaults."""
        args = args + self._defaults[len(args) :]
        refuse_weight_gradients((name, args[position]) for name, position in self._frozen)
        saved = self.saved(args, results if isinstance(results, tuple) else ())
        ctx.save_for_backward(*saved)
        ctx.saves, ctx.options = bool(saved), self._options | options

    def _backward(self, ctx: Any, grad: Tensor, needs_grad: Sequence[bool]) -> list[Tensor | None]:
        """Return the gradients of the arguments; trailing arguments may have been left out."""
        needs = tuple(any(needs_grad[position : position + 1]) for position in self.positions)
        # Reading them is an error in a second backward. A backward that saves nothing can run twice: with a cached
        # weight, say.
        saved = ctx.saved_tensors if ctx.saves else ()
        grads = self.gradients(grad, saved, needs=needs, **ctx.options)
        result: list[Tensor | None] = [None] * len(self._positional)
        for position, of_argument in zip(self.positions, grads, strict=True):
            result[position] = of_argument
        return result


def _autograd_function(operator: Operator) -> type[torch.autograd.Function]:
    """Return the autograd function of a call: (dispatch keys, options, *arguments) -> the operator's results."""

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keys: torch._C.DispatchKeySet, options: dict[str, Any], *args: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                below = keys & torch._C._after_autograd_keyset
                results = operator._overload.redispatch(below, *args, **options)
            operator._save(ctx, args, options, results)
            if isinstance(results, tuple) and (kept := results[operator._saved_results]):
                ctx.mark_non_differentiable(*kept)
                ctx.set_materialize_grads(False)  # which would be zeros of their sizes
            return results

        @staticmethod
        def backward(ctx: Any, grad: Tensor, *_: Tensor) -> Any:
            return None, None, *operator._backward(ctx, grad, ctx.needs_input_grad[2:])

    Differentiable.__name__ = Differentiable.__qualname__ = operator.name
    return Differentiable


def _kinds_of(declared: str) -> tuple[type, ...]:
    """Return the types of Python that arguments of a schema's type have."""
    of_value = declared.removeprefix("Optional[").removesuffix("]")
    return _KINDS[of_value] if of_value == declared else (*_KINDS[of_value], type(None))


# Representation of a set of dispatch keys -> True if only a backend's key is left below autograd's.
_PLAIN: dict[int, bool] = {}


def _is_plain(keys: torch._C.DispatchKeySet) -> bool:
    """True if a kernel of dense CPU or CUDA tensors alone is left to run: no mode, no transform, no subclass."""
    below: Any = keys & torch._C._after_autograd_keyset
    below = below.remove(torch._C.DispatchKey.ADInplaceOrView)  # of views and in-place operators alone
    backends = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)
    plain = any(below == torch._C.DispatchKeySet(backend) for backend in backends)
    _PLAIN[keys.raw_repr()] = plain
    return plain


def is_eager() -> bool:
    """True if no compiler, tracer, dispatch mode or transform of torch.func sees what is called. (False under Thunder,
    by a lookaside of compilers.thunder.executor.)"""
    return not torch.compiler.is_compiling() and _dispatch_modes() == 0 and _transform() is None and _tracing() is None


def is_plain_eager(tensor: Tensor) -> bool:
    """True if a call with a tensor has only a kernel to dispatch: eager, no gradients, autocast, modes, transforms.

    `Operator.__call__` then leaves the dispatcher out, which takes 8 us of a call's 20 on an H100's host. False under
    Thunder, by a lookaside of compilers.thunder.executor.
    """
    return (
        not torch.compiler.is_compiling()
        and type(tensor) is Tensor
        and not _grad_enabled()
        and not _autocast_enabled()
        and _dispatch_modes() == 0
        and (_function_modes() == 0 or _only_devices())
        and _transform() is None
        and _tracing() is None
        and forward_ad._current_level < 0
        and not _is_functional(tensor)
        and chooses_freely()
        and not _profiler_enabled()  # it lists the dispatcher's calls
    )


# Each takes less than 0.2 us of an H200's host, a set of dispatch keys more than all of them together.
_grad_enabled, _autocast_enabled = torch.is_grad_enabled, torch._C._is_any_autocast_enabled
_is_functional = torch._is_functional_tensor
_tracing, _profiler_enabled = torch._C._get_tracing_state, torch._C._autograd._profiler_enabled
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_transform = torch._C._functorch.peek_interpreter_stack


def _only_devices() -> bool:
    """True if all function modes come from torch.set_default_device, which makes no difference to kernels."""
    return all(type(mode) is DeviceContext for mode in _get_current_function_mode_stack())


def define(
    name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]
) -> tuple[torch.library.Library, Any]:
    """Register an operator of the namespace thunder_moe at the dispatcher's low level: -> its library, its overload.

    `torch.library.custom_op` would run three Python functions around the kernel at every call. Like there, an operator
    of the same name is replaced, for modules that are reloaded.
    """
    library = get_library_allowing_overwrite("thunder_moe", name)
    library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"thunder_moe::{name}", fake, lib=library)
    library.impl(name, kernel, "CompositeExplicitAutograd")
    untraced(kernel)
    return library, getattr(torch.ops.thunder_moe, name).default


def untraced(kernel: Any) -> None:
    """Keeps torch.compile from tracing a kernel's Python where an operator is called outside of a graph."""
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    eval_frame.set_code_exec_strategy(kernel.__code__, skip)


for _kernel in (Operator._dispatch, Operator._run_plain):
    untraced(_kernel)


def _no_view(result: Tensor) -> Any:
    return torch.ops.aten._unsafe_view.default(result, result.shape) if result._is_view() else result


def operator(**description: Any) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate the function of an operator: register it, and return a function that calls the operator.

    It takes the arguments of `Operator`.
    """

    def register(function: Callable[P, R]) -> Callable[P, R]:
        return Operator(function, **description).public

    return register


def weight_operator(**description: Any) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Decorate the function of the operators of packed weights: register one for each number format.

    It takes the arguments of `Operator`. The decorated function calls the operator for NVFP4.
    """

    def register(function: Callable[..., R]) -> Callable[..., R]:
        of_nvfp4, *_ = (Operator(function, format=format, **description) for format in BLOCK_FORMATS.values())
        return of_nvfp4.public

    return register


def operator_for(name: str, format: BlockFormat = NVFP4) -> Callable[..., Any]:
    """Return the callable that runs an operator, given its NVFP4 name, on weights of a number format.

    In eager code it is the `Operator`, which leaves the dispatcher out where it can; compilers see torch's own object.
    """
    name = op_name_for(name, format)
    return getattr(torch.ops.thunder_moe, name) if torch.compiler.is_compiling() else OPERATORS[name]


def op_name_for(name: str, format: BlockFormat) -> str:
    """Return the name of an NVFP4 operator's form for weights of another number format."""
    return name.replace(NVFP4.name, format.name)


def _documentation(function: Callable[..., Any], format: BlockFormat) -> str:
    """Return the docstring of an operator for another format than NVFP4."""
    summary = (function.__doc__ or "").partition("\n")[0].replace("NVFP4", format.name.upper())
    return (
        f"{summary}\n\n    As `{function.__name__}`, for weights in {format.name.upper()}: {format.operands[0]} is the"
        f" transposed view of qdata, {_plain(format.code_dtypes[0])},\n    the block scales are"
        f" {_plain(format.scale_dtype)}, one for {format.block_size} weights along K, and there are no global scales.\n"
    )


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
