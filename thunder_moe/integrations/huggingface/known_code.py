"""Names and versions of the code that this folder's tables know: `router_table`, `norm_table`, and `GATES` of forms.
Called by these and by routers and norms; calls replaceable.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from torch import nn

from thunder_moe.quantization.replaceable import has_own_forward

NEWEST = (5, 24)  # of transformers that the rows were compared with; its minor versions change what classes compute
_LOGGER = logging.getLogger("thunder_moe")


def names(rows: str) -> Iterator[tuple[str, str]]:
    """Yield module and name of each row of a text such as "mixtral.MixtralRMSNorm llama.LlamaRMSNorm"."""
    for model, _, name in (row.partition(".") for row in rows.split()):
        yield f"transformers.models.{model}.modeling_{model}", name


def key(cls: type) -> tuple[str, str]:
    """Return module and name of a class."""
    return cls.__module__, cls.__qualname__


def origin(function: Any) -> tuple[str, str] | None:
    """Return the module that a function is written in, which functools.wraps does not change, and its name; None for
    another callable."""
    written_in = getattr(function, "__globals__", {}).get("__name__")
    return None if written_in is None else (written_in, function.__qualname__)


def runs_class_forward(module: nn.Module) -> bool:
    """True if a module runs the forward that its class was written with, like its other methods; hooks may run, too."""
    cls = type(module)
    methods = {name: method for name, method in vars(cls).items() if isinstance(method, FunctionType)}
    methods.pop("__init__", None)
    written = all(origin(each) == (cls.__module__, f"{cls.__qualname__}.{name}") for name, each in methods.items())
    compiled = vars(module).get("_compiled_call_impl") is not None
    return "forward" in methods and written and has_own_forward(module) and not compiled


def unknown_version(since: tuple[int, int] = (5, 7)) -> str | None:
    """Return the versions of transformers for which a row holds, as text; None if the installed one is among them.

    A row of a table holds from version `since` to `NEWEST`."""
    import transformers

    major, minor = transformers.__version__.split(".")[:2]
    if since <= (int(major), int(minor)) <= NEWEST:
        return None
    return "in transformers {}.{} to {}.{} alone".format(*since, *NEWEST)


def tell_decision(kind: str, cls: type, operator: str, form: Any, why: str | None) -> None:
    """Log whether modules of a class run an operator in a form; `why` is the `unknown_version` that forbids it."""
    does = "keeps its own operations" if form is None else f"runs {operator}, {form}"
    does += f", slower in eager code: {operator} is known to equal it {why}" if why else ""
    tell(f"{kind} {cls.__name__} {does}", logging.WARNING if why else logging.INFO)


@functools.cache
def tell(message: str, level: int) -> None:
    """Log a message once."""
    _LOGGER.log(level, message)
