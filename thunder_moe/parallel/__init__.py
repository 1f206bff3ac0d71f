"""Expert and tensor parallelism of this package's modules on torch.distributed; re-exports alone. Called by users;
calls nn."""

from thunder_moe.parallel.load import ExpertLoad, expert_load
from thunder_moe.parallel.styles import ExpertParallel, TensorParallel

__all__ = ["ExpertLoad", "ExpertParallel", "TensorParallel", "expert_load"]
