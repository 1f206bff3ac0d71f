"""What sleep of level 2 and the reload after it do to an engine's memory, on a CPU, where vLLM has no sleep mode.
Called by the tests beside it; calls the engine's worker.

vLLM makes what it allocates while a model is loaded in a memory pool of its own. Level 2 drops that pool's contents and
keeps those of the model's buffers alone; reload_weights is to bring everything else back.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


@contextlib.contextmanager
def watched_loading() -> Iterator[list[Tensor]]:
    """The tensors that loading made, one for each piece of memory, when an engine has been made inside."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    load_model, made = CPUWorker.load_model, []

    def watched(self: Any, **options: Any) -> None:
        before = _storages()  # kept alive, so that no new one has the address of an old one
        load_model(self, **options)
        made.extend(tensor for place, tensor in _storages().items() if place not in before)

    CPUWorker.load_model = watched
    try:
        yield made
    finally:
        CPUWorker.load_model = load_model


def _storages() -> dict[int, Tensor]:
    # No fake tensors, which have no memory and which whatever was compiled before may have left.
    tensors = [each for each in gc.get_objects() if type(each) is Tensor or issubclass(type(each), Parameter)]
    plain = [each for each in tensors if each.device.type == "cpu" and each.layout == torch.strided]
    return {each.untyped_storage().data_ptr(): each for each in plain if each.untyped_storage().nbytes()}


def worker_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def sleep_and_wake_up(llm: Any, made: list[Tensor]) -> None:
    """Fills what loading made with ones, NaN in each floating-point format, as the contents of new memory may be, then
    restores the buffers and loads the weights again."""
    model = worker_of(llm).model_runner.get_model()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for tensor in made:
        if tensor.dtype == torch.int64 and tensor.ndim == 0:  # an address of vLLM's CPU kernels, that a GPU has none of
            continue
        torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(0xFF)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    llm.collective_rpc("reload_weights")
    llm.reset_prefix_cache()
