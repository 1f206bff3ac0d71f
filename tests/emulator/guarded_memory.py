"""Tensors that end where their memory does, for kernels that a test runs on this CPU.
Called by the tests of the CUDA kernels; calls mmap and mprotect.
"""

import ctypes
import mmap

import torch


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that ends where its memory does: a read or write beyond it ends the process."""
    pages = -(-tensor.nbytes // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    # Protection 0: neither read nor write.
    assert protect(ctypes.c_void_p(start + pages * mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=pages * mmap.PAGESIZE)[-tensor.nbytes :]
    copy = flat.view(tensor.dtype).view(tensor.shape)
    copy.view(torch.uint8).copy_(tensor.contiguous().view(torch.uint8))
    return copy
