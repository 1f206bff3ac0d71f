"""Progress bars that write a line now and then where standard error is not a terminal: a log file, a pipe.
Called by quantization, checkpoint, sensitivity, integrations, benchmarks and examples; calls nothing of the package.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Any, TextIO

from tqdm import tqdm

# Seconds between two lines of a bar.
_INTERVAL = 30.0


class _Lines:
    """A file for tqdm, which starts each state of a bar with a carriage return, and ends a bar with a newline.

    Writes the last state at the end, and the current one each `_INTERVAL` seconds. tqdm's own `mininterval` does not
    limit the output of set_description and set_postfix.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._state = ""
        self._written = time.monotonic()

    def write(self, text: str) -> None:
        state = text.strip()
        self._state = state or self._state
        now = time.monotonic()
        if text == "\n" or (state and now - self._written >= _INTERVAL):
            self._stream.write(f"{self._state}\n")
            self._stream.flush()
            self._written = now

    def flush(self) -> None:
        """Does nothing: each line is flushed."""


def progress_bar(iterable: Iterable[Any] | None = None, **options: Any) -> tqdm[Any]:
    """Makes tqdm's bar on standard error; it writes lines if that is neither a terminal nor a notebook's cell.

    Args:
        iterable: the items that the bar counts; None for a bar that its caller updates.
        options: tqdm's.
    """
    if sys.stderr is None:  # closed, as in a daemon
        options["disable"] = True
    terminal = getattr(sys.stderr, "isatty", lambda: True)
    if not terminal() and "ipykernel" not in sys.modules:
        options = {"file": _Lines(sys.stderr), "position": 0} | options  # position: no moves of the cursor, if nested
    return tqdm(iterable, **options)
