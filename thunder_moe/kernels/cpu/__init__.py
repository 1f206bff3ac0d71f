"""The compiled CPU backend: `backend` builds and calls what is in src/. Called by kernels.select."""
