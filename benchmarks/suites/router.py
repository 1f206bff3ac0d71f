"""Times routers: a model's own softmax, top-k and normalization, then the sort of slots, beside `moe_router`.
Called by `python -m benchmarks router`; calls thunder_moe's operators, quantize_, transformers and benchmarks/harness.

    torch              transformers' operations on the logits: scores and expert ids
    torch + moe_route  the same, and the order of rows for grouped GEMMs
    moe_router         all of it

A time is the time per call of many calls in a row (on CUDA one CUDA graph). The rows named "layer" are whole blocks of
Qwen3-30B-A3B after quantize_, once with transformers' router, once with the router of quantize_.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness.report import comma_list, one_of, parser, plot, positive, save, table, timed
from benchmarks.harness.timing import Timing, measure
from thunder_moe import moe_route, moe_router, quantize_
from thunder_moe.progress import progress_bar

STEM = "router"
BASELINE = "torch + moe_route"
TOKENS = [1, 32, 128, 1024, 8192]
CALLS = 20  # in a row
LAYER = "qwen3-30b-a3b layer"
Chosen = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Router:
    """A model's router.

    Attributes:
        experts: E.
        dtype: of the logits.
        own: logits (T, E) and the correction (E,) -> scores and expert ids (T, A), as transformers computes them.
        options: of `moe_router` for the same.
        corrected: there is a correction of the choice.
    """

    experts: int
    dtype: torch.dtype
    own: Callable[[Tensor, Tensor | None], Chosen]
    options: dict[str, Any]
    corrected: bool = False


def _softmax(top_k: int, dtype: torch.dtype, logits: Tensor, _: Tensor | None) -> Chosen:
    scores, ids = torch.topk(F.softmax(logits, dim=-1, dtype=torch.float32), top_k, dim=-1)
    scores /= scores.sum(dim=-1, keepdim=True)
    return scores.to(dtype), ids


def _gpt_oss(logits: Tensor, _: Tensor | None) -> Chosen:
    values, ids = torch.topk(logits, 4, dim=-1)
    return F.softmax(values, dim=1, dtype=values.dtype), ids


def _deepseek_v3(logits: Tensor, correction: Tensor | None) -> Chosen:
    scores = logits.sigmoid()
    assert correction is not None
    choice = scores + correction
    groups = choice.view(-1, 8, 32).topk(2, dim=-1)[0].sum(dim=-1)
    best = torch.topk(groups, k=4, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(groups)
    mask.scatter_(1, best, 1)
    mask = mask.unsqueeze(-1).expand(-1, 8, 32).reshape(-1, 256)
    choice = choice.masked_fill(~mask.bool(), float("-inf"))
    ids = torch.topk(choice, k=8, dim=-1, sorted=False)[1]
    weights = scores.gather(1, ids)
    weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
    return weights * 2.5, ids


_BF16, _F32 = torch.bfloat16, torch.float32
_DEEPSEEK = dict(top_k=8, score="sigmoid", epsilon=1e-20, scale=2.5, num_groups=8, top_groups=4)
ROUTERS = {
    "qwen3-30b-a3b": Router(128, _BF16, partial(_softmax, 8, _BF16), dict(top_k=8)),
    "mixtral-8x7b": Router(8, _BF16, partial(_softmax, 2, _F32), dict(top_k=2, scores_dtype=_F32)),
    "gpt-oss-20b": Router(32, _BF16, _gpt_oss, dict(top_k=4)),
    "deepseek-v3": Router(256, _F32, _deepseek_v3, _DEEPSEEK, corrected=True),
}


def main(argv: Sequence[str]) -> list[dict[str, Any]]:
    """Runs the benchmark; prints the table, writes JSON and a plot.

    Args:
        argv: the arguments behind the subcommand.

    Returns:
        The rows of the JSON.

    Raises:
        RuntimeError: the operator chooses other experts than the model's operations.
        SystemExit: bad arguments.
    """
    args = _arguments(argv)
    rows: list[dict[str, Any]] = []
    layers = _layers(args.device) if LAYER in args.routers else {}
    with torch.no_grad(), progress_bar(total=len(args.routers) * len(args.tokens), unit="row") as bar:
        for name in args.routers:
            for tokens in args.tokens:
                bar.set_description(f"{name} {tokens}")
                calls = (
                    _layer_calls(layers, tokens, args.device) if name == LAYER else _calls(name, tokens, args.device)
                )
                repeated = {candidate: partial(_repeat, call) for candidate, call in calls.items()}
                timings = measure(repeated, device=args.device, rounds=args.rounds, budget=args.budget, slow=args.slow)
                rows.append({"router": name, "tokens": tokens, **timed(_of_one(timings), BASELINE)})
                bar.update()
    path = save(STEM, args.device, rows, args.output, calls=CALLS)
    image = plot(
        path,
        rows,
        "tokens",
        panel=lambda row: row["router"],
        label=lambda name, row: name,
        baseline=BASELINE,
        title=f"Routers, {args.device.type}",
    )
    print(table(rows, ("router", "tokens"), BASELINE), path, image, sep="\n")
    return rows


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    names = [*ROUTERS, LAYER]
    result = parser("router", __doc__ or "", shapes=False)
    result.add_argument("--routers", type=comma_list(one_of(names)), help=f"of: {', '.join(names)}")
    result.add_argument("--tokens", type=comma_list(positive), default=TOKENS, help="default: %(default)s")
    args = result.parse_args(argv)
    args.routers = args.routers or (names if args.device.type == "cuda" else [*ROUTERS])
    return args


def _calls(name: str, tokens: int, device: torch.device) -> dict[str, Callable[[], Any]]:
    router = ROUTERS[name]
    logits = torch.randn(tokens, router.experts, device=device).to(router.dtype)
    correction = torch.randn(router.experts, device=device) * 0.1 if router.corrected else None
    _check(name, router.own(logits, correction), moe_router(logits, correction, **router.options)[:2])

    def both() -> Any:
        scores, ids = router.own(logits, correction)
        return scores, moe_route(ids, router.experts)

    return {
        BASELINE: both,
        "torch": lambda: router.own(logits, correction),
        "moe_router": lambda: moe_router(logits, correction, **router.options),
    }


def _check(name: str, own: Chosen, ours: Chosen) -> None:
    """Checks that sums of scores agree, and ids mostly: torch.topk chooses any of equal logits, frequent in bf16."""
    for one, other in zip(own, ours, strict=True):
        assert one.shape == other.shape
    error = float((own[0].float().sum(-1) - ours[0].float().sum(-1)).abs().max())
    same_rows = (own[1].sort(-1).values == ours[1].sort(-1).values).all(-1)
    same = float(same_rows.float().mean())
    if error > 0.02 or (len(same_rows) >= 32 and same < 0.5):
        raise RuntimeError(
            f"{name}: the sums of scores differ by {error:.2g}, {same:.0%} of tokens have the same experts"
        )


def _layers(device: torch.device) -> dict[str, nn.Module]:
    """Return a quantized block of Qwen3-30B-A3B (random weights): with its own router, and as quantize_ leaves it."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    from thunder_moe.integrations.huggingface.routers import restore_routers

    sizes: dict[str, Any] = dict(hidden_size=2048, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768)
    with torch.device(device):
        block = Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**sizes, norm_topk_prob=True)).to(torch.bfloat16)
    for parameter in block.parameters():
        nn.init.normal_(parameter, 0.0, 0.02)
    fused = quantize_(nn.Sequential(block))[0]
    own = copy.deepcopy(fused)
    restore_routers(own)
    return {BASELINE: own, "moe_router": fused}


def _layer_calls(layers: dict[str, nn.Module], tokens: int, device: torch.device) -> dict[str, Callable[[], Any]]:
    hidden = torch.randn(1, tokens, 2048, dtype=torch.bfloat16, device=device)
    return {name: partial(layer, hidden) for name, layer in layers.items()}


def _repeat(call: Callable[[], Any]) -> None:
    for _ in range(CALLS):
        call()


def _of_one(timings: dict[str, Timing]) -> dict[str, Timing]:
    """Return the times of `_repeat` divided by its number of calls."""
    return {
        name: replace(
            each,
            median=each.median / CALLS,
            quartiles=(each.quartiles[0] / CALLS, each.quartiles[1] / CALLS),
            method=f"{each.method} of {CALLS} calls",
        )
        for name, each in timings.items()
    }
