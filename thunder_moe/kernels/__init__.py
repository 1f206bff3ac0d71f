"""Kernels: `select` is the only dispatch; `reference` and `cpu` are backends. Called by ops; calls nvfp4."""
