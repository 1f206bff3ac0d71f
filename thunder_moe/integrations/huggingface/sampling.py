"""Chooses tokens from logits on their device: transformers' logits processors and sampling, without a synchronization.
Called by generation, in the loop and inside its CUDA graphs; calls transformers' processors that never wait for the
GPU, and plain torch in place of the others.

Legend: B texts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.generation import logits_process as processors

_Process = Callable[[Tensor, "State"], Tensor]


class State(Protocol):
    """The tensors that a choice reads and changes, see `generation`."""

    token: Tensor
    position: Tensor
    length: Tensor
    done: Tensor
    seen: Tensor


@dataclass(frozen=True)
class Choice:
    """Describe how a call chooses its tokens."""

    processes: tuple[_Process, ...]  # functions of the scores (B, V) and the state, in transformers' order
    samples: bool  # draw from the distribution; else take the most likely token
    ends: tuple[int, ...]  # ids of the tokens that end a text
    pad: int | None  # the token of texts that have ended; None if no token ends one
    # The texts' tokens that a repetition penalty leaves out, at the front of each: (B,), or one number for all; None
    # without a penalty, when nobody reads `seen`
    history: Tensor | int | None
    settings: Any  # equal for calls that choose alike

    def take(self, logits: Tensor, state: State) -> None:
        """Choose the next tokens from logits (B, V) in float32, and advance the state by them."""
        scores = logits
        for process in self.processes:
            scores = process(scores, state)
        if self.samples:
            # The largest of p / e, e exponential, is a draw from p: torch.multinomial's own way, without its checks.
            token = (scores.softmax(-1) / torch.empty_like(scores).exponential_()).argmax(-1)
        else:
            token = scores.argmax(-1)
        if self.pad is not None:
            token = token.masked_fill(state.done, self.pad)
            for end in self.ends:
                state.done |= token == end
        state.token.copy_(token[:, None])
        state.position += 1
        state.length += 1
        if self.history is not None:
            state.seen.scatter_(1, state.token, True)


def choice_of(logits_processor: Any, config: Any) -> Choice | str:
    """Return the choice that a call's processors and prepared generation config mean, or why it is not known here."""
    processes: list[_Process] = []
    settings: list[Any] = [bool(config.do_sample)]
    for processor in logits_processor:
        known = _KNOWN[type(processor)](processor) if type(processor) in _KNOWN else None
        if known is None:
            return f"{type(processor).__name__} is not known here"
        process, *values = known
        processes.append(process)
        settings.append((type(processor).__name__, *values))
    ends = () if config._eos_token_tensor is None else tuple(config._eos_token_tensor.flatten().tolist())
    pad = None
    if ends:
        pad = int(config._pad_token_tensor)
    settings += [ends, pad]
    penalties = (each for each in logits_processor if isinstance(each, processors.RepetitionPenaltyLogitsProcessor))
    history = next((0 if each.prompt_ignore_length is None else each.prompt_ignore_length for each in penalties), None)
    return Choice(tuple(processes), bool(config.do_sample), ends, pad, history, tuple(settings))


def _of_scores(processor: Any) -> Any:
    """Return a processor that reads the scores alone, without a synchronization, and its settings."""
    return lambda scores, state: processor(None, scores), *vars(processor).values()


def _repetition(processor: Any) -> Any:
    penalty = float(processor.penalty)

    def process(scores: Tensor, state: State) -> Tensor:
        return torch.where(state.seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)

    return process, penalty


def _least_length(processor: Any) -> Any:
    """Return a process that forbids the end of a text before so many tokens, and its settings."""
    ends = processor.eos_token_id.flatten().tolist()
    if isinstance(processor, processors.MinLengthLogitsProcessor):
        length = int(processor.min_length)
    else:
        length = int(processor.prompt_length_to_skip) + int(processor.min_new_tokens)

    def process(scores: Tensor, state: State) -> Tensor:
        early = state.length < length
        scores = scores.clone()
        for end in ends:
            scores[:, end].masked_fill_(early, -float("inf"))
        return scores

    return process, length, *ends


_KNOWN: dict[type, Callable[[Any], Any]] = {
    processors.TemperatureLogitsWarper: _of_scores,
    processors.TopKLogitsWarper: _of_scores,
    processors.TopPLogitsWarper: _of_scores,
    processors.MinPLogitsWarper: _of_scores,
    processors.RepetitionPenaltyLogitsProcessor: _repetition,
    processors.MinLengthLogitsProcessor: _least_length,
    processors.MinNewTokensLengthLogitsProcessor: _least_length,
}
