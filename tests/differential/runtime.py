"""What random programs are made of: exactly representable weights, calls that are recorded, updates of weights.
Called by the source of a program, which is executed once eagerly and once compiled; calls plain PyTorch.

All weights are exact in NVFP4 (and stay so: updates multiply by powers of two, negate or permute experts). A GEMM with
4-bit weights then differs from the 16-bit one by rounding alone, and plain eager PyTorch is the oracle of both.
"""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: F401  (for the programs)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint  # noqa: F401  (for the programs)

__all__ = ["Call", "Run", "copy", "exact", "gc", "is_exact", "tensors_on"]

BF16 = torch.bfloat16
_device = torch.device("cpu")
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# Adam divides by its eps alone when that is so large, and times a learning rate as large the step is the gradient.
_HUGE = 2.0**40
_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": dict(lr=1.0),
    "Adam": dict(lr=_HUGE, eps=_HUGE, betas=(0.0, 0.0)),
    "AdamW": dict(lr=_HUGE, eps=_HUGE, betas=(0.0, 0.0), weight_decay=0.0),
    "Adagrad": dict(lr=_HUGE, eps=_HUGE),
    "RMSprop": dict(lr=_HUGE, eps=_HUGE, alpha=0.0),
}


def tensors_on(device: torch.device | str) -> None:
    """Has the programs of this process use tensors of a device; their values are made on the CPU."""
    global _device
    _device = torch.device(device)


def device() -> torch.device:
    """The device of the programs' tensors."""
    return _device


def exact(experts: int, n: int, k: int, seed: int, *, transposed: bool = False) -> Tensor:
    """A bfloat16 weight (E, N, K), or (E, K, N) when transposed, that NVFP4 holds exactly.

    Values are those of E2M1 times a power of two per block of 16 along K; each block has a value of the largest
    magnitude, which makes its scale a power of two of the expert's.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    random = functools.partial(torch.randint, generator=generator, device="cpu")
    blocks = (experts, n, k // 16, 16)
    values = _E2M1[random(8, blocks)]
    values.scatter_(-1, random(16, (*blocks[:-1], 1)), 6.0)
    values *= 1 - 2 * random(2, blocks)
    exponents = random(-2, 1, (*blocks[:-1], 1)) - (3 if k <= 32 else 4)
    weight = (values * torch.exp2(exponents.float())).view(experts, n, k).to(_device, BF16)
    return weight.transpose(1, 2).contiguous() if transposed else weight


def is_exact(weight: Tensor) -> bool:
    """Whether E2M1 codes hold the weight (E, N, K), with the largest magnitude of each block as 6."""
    blocks = weight.detach().double().unflatten(-1, (-1, 16))
    amax = blocks.abs().amax(-1, keepdim=True)
    scaled = torch.where(amax > 0, blocks.abs() * 6 / amax, 0.0)
    largest = amax.amax((1, 2), keepdim=True)
    ratio = torch.where(amax > 0, torch.log2(largest / amax), 0.0)  # E4M3 scales from 448 down to 2**-6
    on_grid = (scaled[..., None] == _E2M1.double().to(weight.device)).any(-1).all()
    return bool(on_grid and (ratio == ratio.round()).all() and (ratio <= 12).all())


def _offsets(rows: tuple[int, ...]) -> Tensor:
    return torch.tensor(rows, device=_device).cumsum(0).int()


@dataclass
class Call:
    """What one call of a program has done: tensors by name, and which of them require a gradient."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    requires_grad: dict[str, bool] = field(default_factory=dict)
    raised: str | None = None  # the forward has raised this
    backward_raised: str | None = None


class Run:
    """One execution of a program: its model, the callable to test, and a record of each call.

    Args:
        model: of the program; `drive` changes its weights.
        function: the model itself, or what a compiler made of it.
        sizes: (experts, features of the input).
        refresh: tells the compiler of weights that have changed unseen.
        another: makes the callable of a module; of another one of the same class for None.
    """

    def __init__(
        self,
        model: nn.Module,
        function: Callable,
        sizes: tuple[int, int],
        refresh: Callable[[nn.Module], Any],
        another: Callable[[nn.Module | None], tuple[nn.Module, Callable]] | None = None,
    ) -> None:
        self.model, self.function, self.refresh = model, function, refresh
        self._another, self._other = another, None
        self.experts, self.features = sizes
        self.calls: list[Call] = []

    def call(self, mode: str, rows: tuple[int, ...], seed: int, inputs: str = "") -> None:
        """Calls the model and records outputs, changes of inputs, parameters and buffers, and gradients.

        Args:
            mode: "train" (gradients, also of the inputs), "frozen inputs" (gradients of parameters alone), "no_grad"
                or "inference".
            rows: of each expert.
            seed: of the inputs.
            inputs: "view" (rows in the middle of a tensor), "one tensor of offsets" (given twice) or "expanded factor".
        """
        generator = torch.Generator().manual_seed(seed)
        leaves = dict(
            x=torch.randn(sum(rows), self.features, generator=generator).to(_device, BF16),
            s=torch.rand(sum(rows), 1, generator=generator).add(0.5).to(_device, BF16),
        )
        for leaf in leaves.values():
            leaf.requires_grad_(mode == "train")
        # Those a program may change in place, which leaves forbid.
        given = {name: leaf.clone() for name, leaf in leaves.items()}
        given |= dict(o=_offsets(rows), p=_offsets(rows[::-1]))
        if inputs == "view":
            given["x"] = torch.cat([leaves["x"], leaves["x"]])[sum(rows) :]
        elif inputs == "one tensor of offsets":
            given["p"] = given["o"]
        elif inputs == "expanded factor":
            given["s"] = leaves["s"][:1].clone().expand(sum(rows), 1)
        self.model.zero_grad(set_to_none=True)
        record = Call()
        self.calls.append(record)
        guard = {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(mode, torch.enable_grad)
        with guard():
            try:
                outputs = self.function(given["x"], given["o"], given["p"], given["s"])
            except Exception as error:
                record.raised = f"{type(error).__name__}: {error}"
                raise
        outputs = {f"output {i}": output for i, output in enumerate(outputs)}
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        seen = outputs | {f"input {name}": value for name, value in given.items()} | parameters | buffers
        record.tensors |= {name: value.detach().clone() for name, value in seen.items()}
        record.requires_grad |= {name: value.requires_grad for name, value in seen.items()}
        wanted = [output for output in outputs.values() if output.requires_grad]
        if wanted and not torch.is_inference_mode_enabled():
            loss = sum(
                (output.float() * torch.randn(output.shape, generator=generator).to(_device)).sum() for output in wanted
            )
            try:
                loss.backward()
            except RuntimeError as error:
                record.backward_raised = f"{type(error).__name__}: {error}"
                return
        graded = leaves | parameters
        record.tensors |= {f"grad {n}": v.grad.clone() for n, v in graded.items() if v.grad is not None}

    def other(self, copied: bool = False) -> nn.Module:
        """Goes on with another module of the same class, or a copy, which compiled graphs may serve, too; then with
        the first."""
        other = self._other or self._another(copy.deepcopy(self.model) if copied else None)
        (self.model, self.function), self._other = other, (self.model, self.function)
        return self.model

    def step(self, optimizer: str, *weights: Tensor, factor: float, **options) -> None:
        """A step of an optimizer that multiplies weights by a factor, exactly."""
        for weight in weights:
            weight.grad = weight.detach() * (1 - factor)
        getattr(torch.optim, optimizer)(list(weights), **_OPTIMIZERS[optimizer] | options).step()
        for weight in weights:
            weight.grad = None

    def load(self, factor: float, *, assign: bool = False, swap: bool = False) -> None:
        """Loads the model's own state dict times a factor."""
        state = {name: value.detach() * factor for name, value in self.model.state_dict().items()}
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(swap)
        try:
            self.model.load_state_dict(state, assign=assign)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)
