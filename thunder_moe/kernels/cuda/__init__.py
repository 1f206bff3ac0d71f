"""The CUDA backend: `backend` and `training` launch what is in src/, compiled by `nvrtc`. Called by kernels.select."""
