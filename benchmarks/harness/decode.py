"""Runs the timed parts of a model: a decode step, a loop of them, a prefill, generate(); counts a step's bytes.
Called by harness/column.py and suites/{inference,sharded}.py; calls transformers' caches and masks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from transformers import StaticCache
from transformers.cache_utils import StaticLayer
from transformers.masking_utils import LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING, create_masks_for_generate

from benchmarks.harness.models import num_experts

__all__ = ["SPARE", "DecodeStep", "GreedyLoop", "generate_tokens_per_second", "prefill", "step_bytes", "tensor_bytes"]

# Free places of the cache behind the context. A step takes one, until `rewind` gives it back.
SPARE = 64
NVFP4_PER_BF16 = 4.5 / 16
Forward = Callable[..., Any]


class DecodeStep:
    """One token for each text of a batch, behind a context that is in a static cache.

    `keys_values` of all layers are random unless `fill` computes them: their values cost no time. Tokens are random
    too, so that each meets experts of its own. The mask is the one that `generate` prepares for a compiled model.

    All batches share one cache, whose first texts a smaller one takes, so that torch.compile sees another size and not
    another cache.
    """

    keys_values: list[tuple[Tensor, ...]]

    def __init__(self, model: Any, batch: int, context: int) -> None:
        """Allocates the cache.

        Args:
            model: of transformers; decides the cache's shapes.
            batch: most texts.
            context: tokens in the cache.
        """
        self.config = model.config
        self.device = next(model.parameters()).device
        self.context, self.batch = context, batch
        cache_class: Callable[..., Any] = StaticCache  # its layers have no common type
        self.cache = cache_class(config=self.config, max_cache_len=context + SPARE)
        generator = torch.Generator(device=self.device).manual_seed(0)
        self._ids = torch.randint(1, self.config.vocab_size, (batch, 1), device=self.device, generator=generator)
        with torch.no_grad():  # allocates the layers, with the shapes that the attention of this model has
            model(self._ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        # New tensors, because transformers marks its own static, and torch.compile would guard on their addresses.
        self.keys_values = []
        for layer in self.cache.layers:
            layer.keys, layer.values = (
                torch.empty_like(states).normal_(generator=generator) for states in (layer.keys, layer.values)
            )
            self.keys_values.append((layer.keys, layer.values))
            layer.cumulative_length = torch.zeros_like(layer.cumulative_length)
        self.choose(batch)

    def choose(self, batch: int, *, dynamic: bool = False) -> None:
        """Makes the step one of the first `batch` texts; `dynamic` tells torch.compile that their number varies."""
        self.batch = batch
        for layer, states in zip(self.cache.layers, self.keys_values, strict=True):
            layer.keys, layer.values = (tensor[:batch] for tensor in states)
        self.rewind()
        self.token = self._ids[:batch].clone()
        self.positions = torch.full((batch, 1), self.context, device=self.device)
        rows = torch.empty(batch, 1, self.config.hidden_size, dtype=torch.bfloat16, device=self.device)
        ones = torch.ones(batch, self.context + 1, dtype=torch.int64, device=self.device)
        self.mask = _masks(self.config, rows, ones, self.cache, self.positions)
        if dynamic:
            masks = self.mask.values() if isinstance(self.mask, dict) else [self.mask]
            keys_values = (tensor for layer in self.cache.layers for tensor in (layer.keys, layer.values))
            for tensor in (self.token, self.positions, *masks, *keys_values):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)

    @torch.no_grad()
    def fill(self, model: nn.Module, prompt: Tensor) -> None:
        """Puts the keys and values of a prompt (batch, context) into the cache."""
        self._set_length(0)
        model(prompt, past_key_values=self.cache, use_cache=True, logits_to_keep=1)

    def rewind(self) -> None:
        """Gives back the places that steps took: each writes its keys and values one place further, replays too."""
        self._set_length(self.context)

    def _set_length(self, length: int) -> None:
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(length)
            if hasattr(layer, "cumulative_length_int"):  # of layers with a sliding window
                layer.cumulative_length_int = length

    @torch.no_grad()
    def __call__(self, forward: Forward) -> Tensor:
        """Return logits (batch, 1, vocabulary) of a model, eager or compiled."""
        for layer in self.cache.layers:
            if hasattr(layer, "cumulative_length_int"):
                layer.cumulative_length_int = self.context  # compiled code is made for this number
        logits: Tensor = forward(
            self.token,
            attention_mask=self.mask,
            position_ids=self.positions,
            past_key_values=self.cache,
            use_cache=True,
        ).logits
        return logits

    def cache_bytes(self) -> int:
        """Return the bytes of keys and values that a step reads, of the context or of a layer's window."""
        size: int = sum(
            states.nbytes * min(self.context + 1, states.shape[2]) // states.shape[2]
            for layer in self.cache.layers
            for states in (layer.keys, layer.values)
        )
        return size


class GreedyLoop:
    """Greedy decoding behind a prompt, in a static cache whose layers all hold all tokens.

    Attributes:
        cache: `reset()` it before each prompt.
        token: int64 (B, 1), the last one; each call replaces its value.
        advance: runs a decode step and chooses its token; returns its logits (B, 1, V).
        gather: makes the model's logits (B, S, V) whole, (B, S, vocabulary); V < vocabulary if its head is cut.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: Any,
        forward: Forward,
        batch: int,
        length: int,
        gather: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Allocate the cache.

        Args:
            model: of transformers.
            forward: the model, eager or compiled.
            batch: texts.
            length: most tokens of a text.
            gather: the attribute, for a head that is cut over ranks; None: the model's logits are whole.
        """
        cache_class: Callable[..., Any] = StaticCache  # its layers have no common type
        self.gather = gather or (lambda logits: logits)
        self._forward, self.cache = forward, cache_class(config=model.config, max_cache_len=length)
        self.cache.layers = [StaticLayer(length) for _ in self.cache.layers]
        self.token = torch.ones(batch, 1, dtype=torch.int64, device=model.device)
        model(self.token, past_key_values=self.cache, use_cache=True)  # makes the tensors of the cache
        self.advance: Callable[[], Tensor] = lambda: self.read(self.token)

    @torch.no_grad()
    def read(self, ids: Tensor) -> Tensor:
        """Run a prompt (B, S) or a step and choose a token; return the model's logits (B, S, V) of all tokens."""
        logits: Tensor = self._forward(ids, past_key_values=self.cache, use_cache=True).logits
        self.token.copy_(self.gather(logits[:, -1:]).argmax(-1))
        return logits

    @torch.no_grad()
    def capture(self) -> None:
        """Make the decode step a CUDA graph; the model is compiled, and the cache has a free place."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self.advance()

        def replay() -> Tensor:
            graph.replay()
            return logits

        self.advance = replay


def _masks(config: Any, rows: Tensor, ones: Tensor, cache: Any, positions: Tensor) -> Any:
    """Makes masks like generate(): a tensor, or one for each type of layer by its name."""
    try:
        return create_masks_for_generate(config, rows, ones, cache, positions)
    except TypeError:  # transformers 5.17 passes an argument that the mask of chunks does not take
        how: dict[str, Any] = dict(config=config, inputs_embeds=rows, attention_mask=ones)
        how |= dict(past_key_values=cache, position_ids=positions)
        masks: dict[str, Any] = LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING
        return {name: masks[name](**how) for name in set(config.layer_types)}


@torch.no_grad()
def prefill(forward: Forward, ids: Tensor, kept: int = 1) -> Tensor:
    """Return logits (1, kept, vocabulary) of the last tokens of a prompt (1, tokens), which goes into a new cache."""
    logits: Tensor = forward(ids, use_cache=True, logits_to_keep=kept).logits
    return logits


@torch.no_grad()
def generate_tokens_per_second(model: nn.Module, *, prompt_tokens: int, new_tokens: int, rounds: int) -> list[float]:
    """Times `rounds` calls of generate() after a warm-up call: greedy, one text, transformers' default cache."""
    config: Any = model.config
    device = next(model.parameters()).device
    ids = torch.randint(1, config.vocab_size, (1, prompt_tokens), device=device)
    options = dict(max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
    found = []
    for _ in range(1 + rounds):
        start = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), **options)  # type: ignore[operator]
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(new_tokens / (time.perf_counter() - start))
    return found[1:]


def tensor_bytes(module: nn.Module) -> int:
    """Return the bytes of a module's parameters and buffers, each once."""
    return sum({id(t): t.nbytes for t in [*module.parameters(), *module.buffers()]}.values())


def step_bytes(model: nn.Module, experts: Collection[str], step: DecodeStep, *, packed: bool) -> float:
    """Return the bytes that a decode step reads: the experts that have tokens, all other weights, keys and values.

    The experts with tokens are counted for a router that chooses evenly, as routers of random weights nearly do.

    Args:
        model: as it is in memory.
        experts: names of its experts modules.
        step: with its batch.
        packed: whether 16-bit experts are read as 4-bit copies, as compiled code with backend="thunder_moe" does.
    """
    config: Any = step.config
    total, chosen = num_experts(config), config.num_experts_per_tok
    active: float = 1 - (1 - chosen / total) ** step.batch
    of_experts = sum(tensor_bytes(model.get_submodule(name)) for name in experts)
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    rest = tensor_bytes(model) - of_experts - (0 if _tied(model) else tensor_bytes(embedding))
    return of_experts * active * (NVFP4_PER_BF16 if packed else 1) + rest + step.cache_bytes()


def _tied(model: nn.Module) -> bool:
    """True if the embedding is also the head, which reads all of it."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    return getattr(head, "weight", None) is model.get_input_embeddings().weight  # type: ignore[operator]
