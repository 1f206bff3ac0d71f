"""The compile-time rewrite, for torch.compile (dynamo/) and Thunder (thunder/), which share the modules of this folder.
Called by the two compilers; calls ops, weight_cache.py and formats. Nothing is imported here.
"""
