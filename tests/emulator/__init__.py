"""A CUDA emulator for the CPU: cuda_emulator.h, its builds, and tensors that end at a guard page.
Called by the tests of kernels; calls the C++ compiler.
"""
