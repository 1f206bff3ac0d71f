"""`ForkLock`: a lock that a forked process finds open, even if a thread of its parent held it at the time.
Called by weight_cache, kernels.cpu and kernels.cuda.chain; calls os.register_at_fork, which Windows lacks.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any


class ForkLock:
    """A reentrant lock for ``with``. A forked process has no thread left that could release a lock that was held.

    The guarded state is written as a whole when it is complete, so that the child finds it done or not begun.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        if hasattr(os, "register_at_fork"):
            reference = weakref.ref(self)
            os.register_at_fork(after_in_child=lambda: _renew(reference()))

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: Any) -> None:
        self._lock.release()


def _renew(lock: ForkLock | None) -> None:
    if lock is None:
        return
    if lock._lock.acquire(blocking=False):  # free, or held by the thread that forked, which goes on here
        lock._lock.release()
    else:
        lock._lock = threading.RLock()
