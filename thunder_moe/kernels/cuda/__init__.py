"""The CUDA backend: `backend` compiles (nvrtc) and launches what is in src/. Called by kernels.select."""
