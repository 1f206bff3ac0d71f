"""`interrupted`: calls a function again and again, each time interrupted at a later operation of torch.
Called by tests of functions that change a model in place.
"""

from torch.utils._python_dispatch import TorchDispatchMode


class _StopAt(TorchDispatchMode):
    """Raises a KeyboardInterrupt, as Ctrl-C does, in place of the n-th operation."""

    def __init__(self, number):
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


def interrupted(function, step=1):
    """Yields after each call that was interrupted; ends with the call that was not."""
    number = 1
    while True:
        try:
            with _StopAt(number):
                function()
        except KeyboardInterrupt:
            yield number
        else:
            return
        number += step
