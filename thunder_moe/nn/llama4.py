"""Mixture-of-Experts modules: GroupedLinear, SwiGLU, GroupedSwiGLU, Llama4MoE; nvfp4_modules has the 4-bit ones.
Called by users and by quantize; calls torch's grouped GEMM, or the package's operators once a module is quantised.

Legend: T tokens, M = T * top_k rows sorted by expert, E experts, H hidden_size, I intermediate_size,
N out_features, K in_features. `offsets` is int32 (E,): cumulative row ENDS, group 0 starts at row 0.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thunder_moe.formats.nvfp4 import require
from thunder_moe.nn.quantized import MODULE_LAYOUTS, NVFP4GroupedLinear, NVFP4GroupedSwiGLU, weights_to_fuse
from thunder_moe.ops.experts import moe_experts
from thunder_moe.routing import invert, sort_by_expert

if TYPE_CHECKING:
    from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

__all__ = [
    "MODULE_LAYOUTS",
    "GroupedLinear",
    "GroupedSwiGLU",
    "Llama4MoE",
    "Llama4MoEConfig",
    "NVFP4GroupedLinear",
    "NVFP4GroupedSwiGLU",
    "SwiGLU",
]


class GroupedLinear(nn.Module):
    """One linear map per expert, without bias: rows of expert e are multiplied by ``weight[e].T``.

    Args:
        num_experts: E.
        in_features: K.
        out_features: N.
        dtype: of the weight, torch's default when None.
        device: of the weight, torch's default when None.

    Attributes:
        weight: parameter (E, N, K), initialised as `torch.nn.Linear` does: U(-K**-0.5, K**-0.5).
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        sizes = dict(num_experts=num_experts, in_features=in_features, out_features=out_features)
        for name, size in sizes.items():
            _require_positive(name, size)
        self.num_experts, self.in_features, self.out_features = num_experts, in_features, out_features
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features, dtype=dtype, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.in_features**-0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """(M, K) rows sorted by expert, offsets (E,) row ends -> (M, N); rows past ``offsets[-1]`` are undefined.

        Raises:
            ValueError: x or offsets has the wrong rank, size, dtype or device.
        """
        _check_rows(x, offsets, self.weight)
        return F.grouped_mm(x, self.weight.transpose(-2, -1), offs=offsets)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, in_features={self.in_features}, out_features={self.out_features}"


class SwiGLU(nn.Module):
    """Dense feed-forward block: ``down_proj(silu(gate_proj(x)) * up_proj(x))``, (..., H) -> (..., H)."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = dict(bias=False, dtype=dtype, device=device)
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, **options)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, **options)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class GroupedSwiGLU(nn.Module):
    """The experts of a layer: `SwiGLU` with one set of weights per expert.

    Args:
        num_experts: E.
        hidden_size: H.
        intermediate_size: I.
        dtype: of the weights.
        device: of the weights.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = dict(dtype=dtype, device=device)
        self.gate_proj = GroupedLinear(num_experts, hidden_size, intermediate_size, **options)
        self.up_proj = GroupedLinear(num_experts, hidden_size, intermediate_size, **options)
        self.down_proj = GroupedLinear(num_experts, intermediate_size, hidden_size, **options)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """(M, H) rows sorted by expert, offsets (E,) row ends -> (M, H)."""
        return self.down_proj(F.silu(self.gate_proj(x, offsets)) * self.up_proj(x, offsets), offsets)


@dataclass(frozen=True)
class Llama4MoEConfig:
    """Sizes of a `Llama4MoE`.

    Attributes:
        hidden_size: H.
        intermediate_size: I of each routed expert, and of each shared one.
        num_routed_experts: E.
        num_shared_experts: experts that see every token, run as one of num_shared_experts * I; 0 for none.
        top_k: routed experts per token.

    Raises:
        ValueError: a size is not positive, or top_k exceeds num_routed_experts.
    """

    hidden_size: int
    intermediate_size: int
    num_routed_experts: int
    num_shared_experts: int = 1
    top_k: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            _require_positive(field.name, getattr(self, field.name), least=int(field.name != "num_shared_experts"))
        if self.top_k > self.num_routed_experts:
            raise ValueError(f"top_k: got {self.top_k}, wanted at most num_routed_experts = {self.num_routed_experts}")


class Llama4MoE(nn.Module):
    """The Mixture-of-Experts feed-forward block of Llama 4.

    router -> top_k -> rows sorted by expert, times sigmoid(router logit) -> routed experts -> sum per token; plus the
    shared expert

    Traceable by Thunder and by ``torch.compile(fullgraph=True)``; never synchronises with the host.

    Args:
        config: the sizes.
        dtype: of the weights, torch's default when None.
        device: of the weights.
    """

    def __init__(
        self,
        config: Llama4MoEConfig,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        hidden, intermediate = config.hidden_size, config.intermediate_size
        self.num_experts, self.top_k = config.num_routed_experts, config.top_k
        options: dict[str, Any] = dict(dtype=dtype, device=device)
        self.router = nn.Linear(hidden, self.num_experts, bias=False, **options)
        self.routed_experts = GroupedSwiGLU(self.num_experts, hidden, intermediate, **options)
        shared = config.num_shared_experts
        self.shared_expert: SwiGLU | None = SwiGLU(hidden, shared * intermediate, **options) if shared else None

    @classmethod
    def from_transformers(cls, module: Llama4TextMoe) -> Llama4MoE:
        """Copies the weights of a transformers `Llama4TextMoe` exactly.

        Raises:
            TypeError: module is not a `Llama4TextMoe`, or one of a subclass.
            ValueError: its activation is not SiLU, or its forward or that of one of its parts was replaced.
            ImportError: transformers is missing.
        """
        try:
            from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
        except ImportError as error:
            raise ImportError(
                "from_transformers needs transformers: pip install 'thunder_moe[transformers]'"
            ) from error
        from thunder_moe.replaceable import has_own_forward

        if type(module) is not Llama4TextMoe:
            raise TypeError(f"module: got {type(module).__name__}, wanted transformers' Llama4TextMoe")
        for name, part in (("module", module), *((f"module.{name}", part) for name, part in module.named_children())):
            if not has_own_forward(part):
                raise ValueError(f"{name}: its forward was replaced, wanted that of {type(part).__name__}")
        probes = torch.linspace(-10, 10, 41, device="cpu", dtype=torch.float32)
        for name, act_fn in (
            ("experts.act_fn", module.experts.act_fn),
            ("shared_expert.activation_fn", module.shared_expert.activation_fn),
        ):
            if not torch.allclose(act_fn(probes), F.silu(probes)):
                raise ValueError(f"module.{name}: got {act_fn}, wanted SiLU")
        gate_up, down = module.experts.gate_up_proj, module.experts.down_proj  # (E, H, 2I), (E, I, H)
        experts, intermediate, hidden = down.shape
        config = Llama4MoEConfig(hidden, intermediate, experts, top_k=module.top_k)
        moe = cls(config, dtype=down.dtype, device=down.device)
        gate, up = gate_up.chunk(2, -1)
        state = {f"shared_expert.{name}": tensor for name, tensor in module.shared_expert.state_dict().items()}
        state |= {"router.weight": module.router.weight, "routed_experts.down_proj.weight": down.mT}
        state |= {"routed_experts.gate_proj.weight": gate.mT, "routed_experts.up_proj.weight": up.mT}
        moe.load_state_dict(state)
        moe.requires_grad_(down.requires_grad)
        return moe.train(module.training)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, S, H) -> (B, S, H).

        Raises:
            ValueError: hidden_states has the wrong rank or hidden size.
        """
        if hidden_states.ndim != 3 or hidden_states.shape[-1] != self.config.hidden_size:
            shape = tuple(hidden_states.shape)
            raise ValueError(f"hidden_states: got shape {shape}, wanted (batch, sequence, {self.config.hidden_size})")
        x_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
        out_TH = self.run_routed_experts(x_TH)
        if self.shared_expert is not None:
            out_TH = out_TH + self.shared_expert(x_TH)
        return out_TH.reshape(hidden_states.shape)

    def run_routed_experts(self, x_TH: Tensor) -> Tensor:
        """(T, H) -> (T, H): the routed experts alone, weighted by the router."""
        logits_TA, ids_TA = self.router(x_TH).topk(self.top_k, dim=-1)  # A = top_k
        weights = weights_to_fuse(self.routed_experts)
        if weights is not None:
            return moe_experts(x_TH, ids_TA, torch.sigmoid(logits_TA.float()), *weights, weight_on_input=True)
        order_M, offsets_E = sort_by_expert(ids_TA.reshape(-1), self.num_experts)
        weight_M = torch.sigmoid(logits_TA.float()).to(x_TH.dtype).reshape(-1)[order_M]
        rows_MH = x_TH[order_M // self.top_k] * weight_M[:, None]
        inverse_M = invert(order_M)
        out_MH = self.routed_experts(rows_MH, offsets_E)[inverse_M]
        return out_MH if self.top_k == 1 else out_MH.reshape(-1, self.top_k, x_TH.shape[-1]).sum(1)


def _check_rows(x: Tensor, offsets: Tensor, weight: Tensor) -> None:
    """The checks of `GroupedLinear.forward`; conditions on sizes and dtypes alone, so that compilers trace through."""
    experts, _, k = weight.shape
    require(x.ndim == 2 and x.shape[1] == k, "x", x, f"shape (rows, in_features = {k})")
    require(x.dtype == weight.dtype, "x", x, f"dtype {weight.dtype}, that of the weight")
    require(x.device == weight.device, "x", x, f"device {weight.device}, that of the weight")
    # While Thunder traces, a dtype is one of its own; its symbol for the grouped GEMM checks it then.
    require(
        offsets.dtype == torch.int32 or not isinstance(offsets.dtype, torch.dtype), "offsets", offsets, "dtype int32"
    )
    wanted = f"shape ({experts},), one row end per expert"
    require(offsets.ndim == 1 and offsets.shape[0] == experts, "offsets", offsets, wanted)
    require(offsets.device == x.device, "offsets", offsets, f"device {x.device}, that of x")


def _require_positive(name: str, size: int, *, least: int = 1) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < least:
        raise ValueError(f"{name}: got {size!r}, wanted an integer of at least {least}")
