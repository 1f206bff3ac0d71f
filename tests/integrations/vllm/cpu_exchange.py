"""A worker of vLLM on a CPU whose data-parallel ranks can exchange tokens: vLLM's communicator there has no all-gather
and no reduce-scatter of different sizes, so that it stops at the first token.
Named by tests as `worker_cls`, or called for a group of processes; calls torch.distributed.
"""

import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.v1.worker.cpu_worker import CPUWorker


def _own(communicator, sizes):
    start = sum(sizes[: communicator.rank_in_group])
    return slice(start, start + sizes[communicator.rank_in_group])


def _all_gatherv(self, tensors, dim=0, sizes=None):
    assert dim == 0
    if isinstance(tensors, torch.Tensor):
        return _all_gatherv(self, [tensors], dim, sizes)[0]
    sizes = sizes or [len(tensors[0])] * self.world_size
    every = [tensor.new_zeros(sum(sizes), *tensor.shape[1:]) for tensor in tensors]
    for place, tensor in zip(every, tensors, strict=True):
        place[_own(self, sizes)] = tensor
        torch.distributed.all_reduce(place, group=self.cpu_group)
    return every


def _reduce_scatterv(self, partial, dim=0, sizes=None):
    assert dim == 0
    sizes = sizes or [len(partial) // self.world_size] * self.world_size
    total = partial.clone()
    torch.distributed.all_reduce(total, group=self.cpu_group)
    return total[_own(self, sizes)]


def _reduce_scatterv_into_output(self, partial, output, dim=0, sizes=None):
    return output.copy_(_reduce_scatterv(self, partial, dim, sizes))


def add_exchange():
    CpuCommunicator.all_gatherv = _all_gatherv
    CpuCommunicator.reduce_scatterv = _reduce_scatterv
    CpuCommunicator.reduce_scatterv_into_output = _reduce_scatterv_into_output


class ExchangingWorker(CPUWorker):
    def __init__(self, *args, **options):
        add_exchange()
        super().__init__(*args, **options)
