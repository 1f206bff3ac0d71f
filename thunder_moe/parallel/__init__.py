"""Expert and tensor parallelism of this package's modules on torch.distributed; re-exports alone. Called by users;
calls nn."""

from thunder_moe.parallel.exchange import Exchange, Sent
from thunder_moe.parallel.load import ExpertLoad, expert_load
from thunder_moe.parallel.styles import ExpertParallel, TensorParallel

__all__ = ["Exchange", "ExpertLoad", "ExpertParallel", "Sent", "TensorParallel", "expert_load"]
