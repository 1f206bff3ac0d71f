"""The kernels of training: 16-bit grouped GEMMs with their gradients, biases, activations. Called by ops."""
