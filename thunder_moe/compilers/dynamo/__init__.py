"""The torch.compile side: backend.py is the entry point, rewrite.py changes the graph.
Called by torch.compile; calls the rewrite of this folder.
"""

from thunder_moe.compilers.dynamo.backend import thunder_moe_backend

__all__ = ["thunder_moe_backend"]
