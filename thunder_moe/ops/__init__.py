"""The torch.library operators. Called by nn and compilers; calls kernels.select."""
