"""A CUDA emulator for the CPU: `cuda_emulator.h`, and memory with guard pages. Used by the tests of kernels and
formats."""
