"""The torch.compile backend. Called by torch.compile; `backend` is the entry point, `rewrite` does the work."""

from thunder_moe.compilers.dynamo.backend import thunder_moe_backend

__all__ = ["thunder_moe_backend"]
