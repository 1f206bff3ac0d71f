"""A plugin for vLLM: the experts of NVFP4 checkpoints run on this package's kernels. Called by vLLM, see plugin."""
