"""Kernels: `select` chooses a backend, `reference`, `cpu` or `cuda`; `specs` says what work there is.
Called by all layers above, ops first."""
