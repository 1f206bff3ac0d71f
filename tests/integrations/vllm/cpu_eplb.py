"""What vLLM's EPLB lacks on a CPU: the choice of a replica (a Triton kernel), timers, a model that is watched.
Named by tests as `worker_cls`; calls vLLM's EplbState.
"""

import torch
from vllm.distributed.eplb.eplb_state import EplbState
from vllm.model_executor.layers.fused_moe.router import base_router
from vllm.model_executor.models.interfaces import get_mixture_of_experts_model
from vllm.platforms import current_platform
from vllm.v1.worker.cpu_worker import CPUWorker


class Platform:
    """vLLM's platform, of which its configuration says that EPLB runs there."""

    def __getattr__(self, name):
        return getattr(current_platform, name)

    def is_cuda_alike(self):
        return True


class _Event:
    def __init__(self, **options):
        pass

    def record(self):
        pass

    synchronize = record

    def elapsed_time(self, end):
        return 0.0


def _to_places(
    topk_ids, expert_load_view, logical_to_physical_map, logical_replica_count, record_enabled, num_unpadded_tokens=None
):
    """Experts (T, A) -> places of one of their replicas, in turns; counts those of rows that are no padding."""
    flat = topk_ids.flatten().long()
    at = logical_to_physical_map[flat, torch.arange(len(flat)) % logical_replica_count[flat]]
    if record_enabled:
        live = at if num_unpadded_tokens is None else at[: int(num_unpadded_tokens) * topk_ids.shape[-1]]
        expert_load_view += torch.bincount(live, minlength=len(expert_load_view)).to(expert_load_view.dtype)
    return at.view(topk_ids.shape).to(topk_ids.dtype)


class BalancingWorker(CPUWorker):
    def __init__(self, *args, **options):
        base_router.eplb_map_to_physical_and_record = _to_places
        torch.Event = _Event
        super().__init__(*args, **options)

    def load_model(self, **options):
        super().load_model(**options)
        runner = self.model_runner
        runner.eplb_state = EplbState(self.parallel_config, self.device)
        runner._moe_model = get_mixture_of_experts_model(runner.model)
        runner.eplb_state.add_model(runner._moe_model, self.model_config)
