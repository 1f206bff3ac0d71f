"""`fast_generate`: a decoding loop for ``model.generate(..., custom_generate=fast_generate)``, a CUDA graph per token.
Called by transformers' generate; calls the model, sampling for the choice of tokens, compilers.dynamo for the
step, and torch's CUDA graphs.

prompt (eager) -> [ step of the model (compiled) -> choice of the token -> inputs of the next step ], replayed per token

The host runs some steps ahead of the GPU and reads the tokens of earlier steps from pinned memory, so that stop
strings, streamers and time limits cost no synchronization per token.

Legend: B texts, V vocabulary, P tokens of the longest prompt, L tokens that the cache holds.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import logging
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GENERATION_MODES_MAPPING
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from thunder_moe.compilers.dynamo.add_norm import fuse_add_norms
from thunder_moe.compilers.dynamo.backend import compile_inner
from thunder_moe.compilers.dynamo.decode_attention import fuse_decode_attention
from thunder_moe.compilers.dynamo.prefetch import prefetch_operands
from thunder_moe.compilers.dynamo.scopes import copy_of, scopes_of
from thunder_moe.formats.checks import require_type
from thunder_moe.integrations.huggingface.sampling import Choice, choice_of
from thunder_moe.progress import progress_bar

logger = logging.getLogger("thunder_moe")

_AHEAD = 8  # steps that the host launches before it waits for the tokens of the first of them
_ROOM = 256  # the cache holds a multiple of so many tokens, so that prompts of other lengths find an earlier graph
_MOST_STATES = 4  # caches and graphs that are kept for a model, for so many numbers of texts and capacities
_KNOWN_INPUTS = {"attention_mask", "position_ids", "past_key_values", "cache", "use_cache", "logits_to_keep"}


@torch.inference_mode(False)  # the state is written by later calls, which may be in another mode
@torch.no_grad()
def fast_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Tensor:
    """Generate tokens as transformers' own loop does, for ``model.generate(..., custom_generate=fast_generate)``.

    On CUDA the decode step is compiled once per number of texts and capacity of the cache (multiples of 256 tokens),
    and is one CUDA graph together with the choice of the token. Later calls use both again, with prompts of any
    length. The first step of each call runs the compiled model itself, whose guards see what has changed in the model;
    then it is compiled and captured again. The caches of the last four kinds of calls stay in memory until the model
    dies. On other devices the step runs eagerly, unless the generation config has a `compile_config`.

    It knows greedy search and sampling with temperature, top-k, top-p, min-p, repetition penalty and minimum lengths,
    stop tokens, stop strings and other stopping criteria, `max_time`, left-padded prompts, and streamers. Calls that
    ask for anything else (beams, scores, a cache of the caller's, ...) run in transformers' own loop, and the logger
    "thunder_moe" says why.

    transformers 5.24 hands neither `streamer` nor `tokenizer` of `generate` to a function. Give a streamer by
    ``custom_generate=functools.partial(fast_generate, streamer=streamer)``, stop strings by
    ``stopping_criteria=[StopStringCriteria(tokenizer, strings)]``.

    Args:
        model: a decoder of transformers, quantized or not.
        input_ids: (B, P), padded on the left.
        logits_processor: as `generate` has prepared it, and so are the other arguments.
        stopping_criteria: beside the maximum length, which `generation_config` has.
        generation_config: with its special tokens as tensors.
        synced_gpus: True, and weights that FSDP or DeepSpeed's ZeRO 3 shards, are served by transformers' own loop.
        streamer: receives the prompt (B, P), then the new tokens (B,) of each step, on the CPU.
        **model_kwargs: attention_mask (B, P), position_ids (B, P), and the empty cache that `generate` has made, which
            stays empty.

    Returns:
        (B, P + new) token ids; after the end of a text, the padding token.
    """
    wanted = "a model of transformers: model.generate(..., custom_generate=fast_generate) calls it"
    require_type("model", model, GenerationMixin, wanted)
    # generate does not tell a function that weights are sharded, so that all processes have to make the same steps.
    zero3 = is_deepspeed_zero3_enabled()  # type: ignore[no-untyped-call]
    synced_gpus = synced_gpus or zero3 or is_fsdp_managed_module(model)
    reason = _reason_against(model, generation_config, synced_gpus, model_kwargs)
    choice = choice_of(logits_processor, generation_config)
    if reason is None and isinstance(choice, str):
        reason = choice
    if streamer is not None:
        streamer.put(input_ids.cpu())  # as generate does with a streamer of its own: `skip_prompt` drops it
    if reason is None and not isinstance(choice, str):
        with _LOCK:
            return _Call(model, generation_config).run(input_ids, choice, stopping_criteria, streamer, model_kwargs)
    logger.warning("fast_generate: transformers' own loop runs: %s", reason)
    stock = getattr(type(model), GENERATION_MODES_MAPPING[generation_config.get_generation_mode()])
    return stock(
        model, input_ids, logits_processor=logits_processor, stopping_criteria=stopping_criteria,
        generation_config=generation_config, synced_gpus=synced_gpus, streamer=streamer, **model_kwargs,
    )  # fmt: skip


def _reason_against(model: Any, config: Any, synced_gpus: bool, model_kwargs: dict[str, Any]) -> str | None:
    """Return why a call is not served here; None when it is."""
    mode = config.get_generation_mode().value
    if mode not in ("greedy_search", "sample"):
        return f"the generation mode is {mode}"
    if config.return_dict_in_generate:
        return "return_dict_in_generate=True asks for more than the tokens"
    if synced_gpus:
        return "several processes generate in step (synced_gpus)"
    if model.config.is_encoder_decoder:
        return "the model is an encoder and decoder"
    if not config.use_cache or config.prefill_chunk_size is not None:
        return "use_cache=False" if not config.use_cache else "prefill_chunk_size is set"
    if given := {name for name, value in model_kwargs.items() if value is not None} - _KNOWN_INPUTS:
        return f"the model gets {', '.join(sorted(given))}"
    positions = model_kwargs.get("position_ids")
    if positions is not None and positions.ndim != 2:
        return f"position_ids have {positions.ndim} dimensions"
    cache = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
    if cache is not None and int(cache.get_seq_length()) > 0:
        return "the cache holds tokens already"
    if getattr(cache, "_is_user_defined", False):  # not set by older versions, in which such a cache stays empty
        return "the call gets a cache, which is to hold its tokens"
    if str(config.cache_implementation).startswith(("offloaded", "quantized")):
        return f"cache_implementation is {config.cache_implementation!r}"
    if len({*getattr(model, "hf_device_map", {"": 0}).values()}) > 1:
        return "the model is spread over several devices"
    layers = StaticCache(config=model.config, max_cache_len=1).layers
    unknown = {type(layer).__name__ for layer in layers if type(layer) not in (StaticLayer, StaticSlidingWindowLayer)}
    return f"the model's cache has {', '.join(sorted(unknown))}" if unknown else None


@dataclass
class _State:
    """The tensors of a decode step, at fixed addresses, and what runs it."""

    cache: Any  # holds L tokens; its layers share `filled`
    filled: Tensor  # int64 (), the tokens that it holds
    token: Tensor  # (B, 1), the tokens that the next step reads
    position: Tensor  # (B, 1), their positions
    mask: Tensor | None  # (B, L), ones but for padding; None without padding
    seen: Tensor  # (B, V), the tokens of each text, for a repetition penalty
    length: Tensor  # (1,), the tokens of the longest text
    done: Tensor  # (B,), True for texts that have ended
    step: Callable[..., Tensor] = lambda *_: torch.empty(0)  # model, token, position, mask -> logits (B, V)
    compilations: int = 0  # of the step, so far
    captured: Any = None  # the compilations and the addresses of the model's tensors that the graphs were captured with
    graphs: dict[Any, torch.cuda.CUDAGraph] = field(default_factory=dict)  # by the settings of the choice of a token


class _Layer(StaticLayer):  # type: ignore[no-untyped-call]
    """A static layer of a cache whose layers count their tokens together, once a step instead of once a layer."""

    def __init__(self, max_cache_len: int, filled: Tensor) -> None:
        super().__init__(max_cache_len)
        self.cumulative_length = filled

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        places = self.cumulative_length[None]
        if key_states.shape[-2] > 1:  # a prompt
            places = places + torch.arange(key_states.shape[-2], device=key_states.device)
        assert self.keys is not None
        assert self.values is not None
        self.keys.index_copy_(2, places, key_states)
        self.values.index_copy_(2, places, value_states)
        return self.keys, self.values


_LOCK = threading.RLock()  # a state serves one call at a time
_STATES: weakref.WeakKeyDictionary[Any, dict[Any, _State]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def _without_full_collections() -> Iterator[None]:
    """Let Python's garbage collector look at young objects alone, while a compiler makes many that stay.

    The first call with 48 layers then takes 18.4 s of CPU time instead of 21.6, and 3 % more of the host's memory. The
    setting belongs to the process: without `_LOCK`, two threads would restore each other's.
    """
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, 2**31 - 1)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)


class _Call:
    """One call of `fast_generate`."""

    def __init__(self, model: Any, config: Any) -> None:
        self.model, self.config = model, config
        parameters = inspect.signature(model.forward).parameters
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"  # before transformers 5.24
        self.on_cuda = model.device.type == "cuda"

    def run(
        self, input_ids: Tensor, choice: Choice, criteria: Any, streamer: Any, model_kwargs: dict[str, Any]
    ) -> Tensor:
        if self.config.max_length <= input_ids.shape[1]:
            return input_ids
        texts, masked = len(input_ids), model_kwargs.get("attention_mask") is not None
        backend, room = self._backend(), -(-self.config.max_length // _ROOM) * _ROOM
        vocabulary = self.model.config.get_text_config(decoder=True).vocab_size
        key = (texts, room, masked, vocabulary, self.model.dtype, self.model.device, repr(backend))
        states = _STATES.setdefault(self.model, {})
        # A streamer or a criterion may generate, too: it must not find the state of the call that it is in.
        state = states.pop(key, None) or self._new_state(texts, room, masked, vocabulary, backend)
        try:
            return self._generate(state, input_ids, choice, criteria, streamer, model_kwargs)
        finally:
            states[key] = state  # the last ones are kept
            for old in list(states)[:-_MOST_STATES]:
                del states[old]

    def _generate(
        self, state: _State, input_ids: Tensor, choice: Choice, criteria: Any, streamer: Any, model_kwargs: Any
    ) -> Tensor:
        new_tokens = self.config.max_length - input_ids.shape[1]
        ids, mask = input_ids.to(self.model.device), model_kwargs.get("attention_mask")
        self._reset(state, ids, mask, choice)
        stop = _Stop(criteria, input_ids, streamer, new_tokens, choice.pad, self.on_cuda)
        choice.take(self._prompt(state, ids, model_kwargs.get("position_ids")), state)
        ended = stop.put(state.token)

        def step() -> None:
            choice.take(state.step(self.model, state.token, state.position, state.mask), state)

        replay = step
        # transformers' own loop decodes on a GPU with other kernels for 16-bit experts than it reads the prompt with.
        with getattr(self.model, "_optimize_model_for_decode", contextlib.nullcontext)():
            for count in range(1, new_tokens):
                if ended:
                    break
                if count == 2 and self.on_cuda:  # the first step has run the guards of the compiled model
                    replay = self._graph(state, choice, step).replay
                with _without_full_collections() if count == 1 else contextlib.nullcontext():
                    replay()
                ended = stop.put(state.token)
        return torch.cat([input_ids, stop.finish().to(input_ids.device)], 1)

    def _backend(self) -> tuple[str, dict[str, Any] | None] | None:
        """Return the name and the options of the backend that compiles the step; None: it stays eager."""
        chosen = self.config.compile_config
        if self.config.disable_compile or (chosen is None and not self.on_cuda):
            return None
        return ("inductor", None) if chosen is None else (chosen.backend, chosen.options)

    def _new_state(
        self, texts: int, room: int, masked: bool, vocabulary: int, backend: tuple[str, dict[str, Any] | None] | None
    ) -> _State:
        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.model.device)

        cache = StaticCache(config=self.model.config, max_cache_len=room)
        # transformers' layers of sliding windows count their tokens in a Python number, which a graph would keep.
        filled = zeros()
        cache.layers = [_Layer(room, filled) for _ in cache.layers]
        mask, seen = zeros(texts, room) if masked else None, zeros(texts, vocabulary, dtype=torch.bool)
        done = zeros(texts, dtype=torch.bool)
        state = _State(cache, filled, zeros(texts, 1), zeros(texts, 1), mask, seen, zeros(1), done)
        options = {self.cache_name: cache, "use_cache": True, "logits_to_keep": 1}

        def step(model: Any, token: Tensor, position: Tensor, mask: Tensor | None) -> Tensor:
            logits: Tensor = model(input_ids=token, position_ids=position, attention_mask=mask, **options).logits
            filled.add_(1)
            return logits[:, -1].float()

        # torch compiles a code object eight times at most, keeps the results with it, and keeps each backend forever.
        step.__code__ = step.__code__.replace()
        known = weakref.ref(state)

        def compile_graph(graph: Any, inputs: Any) -> Any:
            state = known()
            assert state is not None
            assert backend is not None
            state.compilations += 1
            fused = copy_of(graph)
            fuse_decode_attention(scopes_of(fused, False))
            fuse_add_norms(scopes_of(fused, False))
            prefetch_operands(scopes_of(fused, False))
            options = _options_of(fused) if backend == ("inductor", None) else backend[1] or {}
            return compile_inner(backend[0], fused, inputs, None, options, False)

        state.step = (
            step if backend is None else torch.compile(step, backend=compile_graph, fullgraph=True, dynamic=False)
        )
        return state

    def _reset(self, state: _State, ids: Tensor, mask: Tensor | None, choice: Choice) -> None:
        """Prepare a state for another prompt. NaN of an earlier one would pass any mask, because 0 * NaN is NaN."""
        prompt = ids.shape[1]
        state.cache.reset()  # and `filled`
        state.length.fill_(prompt)
        state.done.zero_()
        if state.mask is not None and mask is not None:
            state.mask.fill_(1)
            state.mask[:, :prompt] = mask.to(ids.device)
        if choice.history is not None:
            left_out = torch.as_tensor(choice.history, device=ids.device).view(-1, 1)
            texts, places = (torch.arange(prompt, device=ids.device) >= left_out).expand_as(ids).nonzero().T
            state.seen.zero_()[texts, ids[texts, places]] = True

    def _prompt(self, state: _State, ids: Tensor, positions: Tensor | None) -> Tensor:
        """Run the prompt; return the logits (B, V) of the first new token."""
        if positions is None:
            places = torch.arange(ids.shape[1], device=ids.device)
            mask = None if state.mask is None else state.mask[:, : ids.shape[1]]
            positions = places if mask is None else (mask.cumsum(-1) - 1).clamp_min(0)
        positions = positions.to(ids.device).expand_as(ids)
        options = {self.cache_name: state.cache, "use_cache": True, "logits_to_keep": 1}
        logits: Tensor = self.model(input_ids=ids, position_ids=positions, attention_mask=state.mask, **options).logits
        state.position.copy_(positions[:, -1:])
        state.filled.fill_(ids.shape[1])
        return logits[:, -1].float()

    def _graph(self, state: _State, choice: Choice, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Return the CUDA graph of the step with this choice, captured unless the model has one at its addresses."""
        tensors = itertools.chain(self.model.parameters(), self.model.buffers())
        now = state.compilations, tuple(tensor.data_ptr() for tensor in tensors)
        if state.captured != now:
            state.captured = now
            state.graphs.clear()
        if choice.settings not in state.graphs:
            state.graphs[choice.settings] = self._capture(state, step)
        return state.graphs[choice.settings]

    def _capture(self, state: _State, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture a step that has run before, without a change of the state."""
        changed = [state.token, state.position, state.length, state.done, state.seen, state.filled]
        before = [tensor.clone() for tensor in changed]
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with progress_bar(total=2, desc="fast_generate: warm up and capture the step", unit="stage") as bar:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                step()  # what it writes into the cache, the next step overwrites
                for tensor, old in zip(changed, before, strict=True):
                    tensor.copy_(old)
            torch.cuda.current_stream().wait_stream(stream)
            bar.update()
            try:
                with torch.cuda.graph(graph):
                    step()
            except RuntimeError as error:
                raise RuntimeError(
                    f"fast_generate: no CUDA graph can hold a step of this {type(self.model).__name__}, because it"
                    " waits for the GPU (transformers' own experts in float32 do); leave custom_generate out"
                ) from error
            bar.update()
        return graph


# What makes a tensor without reading one: alone in a kernel of inductor's, it would not wait for the kernel in front.
_FILLS = re.compile("(new_)?(zeros|ones|full|empty)(_like|_strided)?|fill_|zero_|ones_|scalar_tensor")


def _options_of(graph: Any) -> dict[str, Any]:
    """Return inductor's options for a step: its kernels overlap with ours, which pays if the dense layers are ours.

    The comment at `await_previous_kernel` in kernels/cuda/src/common.cuh says why no kernel may be a fill.
    """
    nodes = [node for node in graph.graph.nodes if node.op in ("call_function", "call_method")]
    names = {node: str(getattr(node.target, "__name__", node.target)) for node in nodes}
    ours = any(str(node.target).endswith("_scaled_mm") for node in nodes)
    # A mask of zeros that is filled where a key is not attended to is one kernel with the comparison.
    masks = {"masked_fill", "masked_fill_"}
    filled = {node for node in nodes if node.users and {names.get(user) for user in node.users} <= masks}
    fills = any(_FILLS.fullmatch(names[node]) for node in nodes if node not in filled)
    overlaps = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    return {"triton.enable_pdl": True} if overlaps and ours and not fills else {}


class _Stop:
    """Tells when a call ends, from the tokens of earlier steps, and hands them to the streamer."""

    def __init__(
        self, criteria: Any, input_ids: Tensor, streamer: Any, new_tokens: int, pad: int | None, on_cuda: bool
    ) -> None:
        texts, self.prompt = input_ids.shape
        longest = self.prompt + new_tokens  # the loop itself ends there
        self.criteria = [
            each for each in criteria if not isinstance(each, MaxLengthCriteria) or each.max_length < longest
        ]
        self.streamer, self.pad, self.on_cuda = streamer, pad, on_cuda
        self.ids = torch.zeros(texts, self.prompt + new_tokens, dtype=torch.long)
        self.ids[:, : self.prompt] = input_ids
        self.tokens = torch.zeros(new_tokens, texts, dtype=torch.long, pin_memory=on_cuda)
        self.events: list[torch.cuda.Event] = []
        self.launched = self.read = 0  # steps
        self.alive = torch.ones(texts, dtype=torch.bool)
        self.ended = False

    def put(self, token: Tensor) -> bool:
        """Note the tokens (B, 1) of a step; return True if the call has ended by what is known of earlier ones."""
        self.tokens[self.launched].copy_(token[:, 0], non_blocking=self.on_cuda)
        self.launched += 1
        if self.on_cuda:
            self.events.append(torch.cuda.Event())
            self.events[-1].record()
        while not self.ended and self.read < self.launched and self._is_due():
            self._look()
        return self.ended

    def _is_due(self) -> bool:
        """True if the next tokens are there, or have to be waited for."""
        return not self.on_cuda or self.launched - self.read > _AHEAD or self.events[self.read].query()

    def _look(self) -> None:
        """Look at the tokens of the next step."""
        if self.on_cuda:
            self.events[self.read].synchronize()
        tokens, end = self.tokens[self.read].clone(), self.prompt + self.read + 1
        if self.pad is not None:  # texts that a stop string has ended, which the GPU does not know
            tokens.masked_fill_(~self.alive, self.pad)
        self.ids[:, end - 1] = tokens
        self.read += 1
        if self.streamer is not None:
            self.streamer.put(tokens)
        for criterion in self.criteria:
            if isinstance(criterion, EosTokenCriteria):
                self.alive &= ~torch.isin(tokens, criterion.eos_token_id.to("cpu"))
            else:
                self.alive &= ~criterion(self.ids[:, :end], None).to("cpu")
        self.ended = not bool(self.alive.any())

    def finish(self) -> Tensor:
        """Look at the remaining steps; return the new tokens (B, new)."""
        while not self.ended and self.read < self.launched:
            self._look()
        if self.on_cuda:
            torch.cuda.current_stream().synchronize()
        if self.streamer is not None:
            self.streamer.end()
        return self.ids[:, self.prompt : self.prompt + self.read].clone()
