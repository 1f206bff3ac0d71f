"""Parses the options `filter`, `ignore`, `linears` and `format` of every entry point: patterns, or a function.
Called by choose, lora, checkpoint.choice, configs of huggingface and vllm, and eligibility; calls formats.registry.

A pattern is a name ("lm_head"), a glob whose ``*`` takes dots, too ("*.layers.0.*"), or "re:" and a regular expression
that is matched from the start of a name ("re:.*layers\\.[02]\\."). A name or a glob that fits a module covers all that
is in it; a regular expression covers only what it matches, because "not layer 0" would match the parents of layer 0.
Patterns name modules with tensors in the state dict, in models as in checkpoints, which have no others.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from thunder_moe.formats.registry import FORMATS, find_format

Patterns = str | Sequence[str]
Selection = Patterns | Callable[[nn.Module, str], bool]
Format = str | Mapping[str, str | None] | Callable[[nn.Module, str], str | None]


@dataclass(frozen=True)
class Names:
    """The modules that patterns may name: modules with tensors in the state dict, their own or of a submodule."""

    where: str  # the model or checkpoint, for messages
    # each name of a module -> all its names; a module that is in several places has several
    all: Mapping[str, Collection[str]]

    @classmethod
    def of_model(cls, model: nn.Module) -> Names:
        """Returns the names of the modules of a model that have weights, which a checkpoint of it has, too."""
        named = [*model.named_modules(remove_duplicate=False)]
        having = {outer for name, module in named if _has_weights(module) for outer in (*parents(name), name)}
        names: dict[nn.Module, list[str]] = {}
        for name, module in named:
            if name in having or module is model:
                names.setdefault(module, []).append(name)
        return cls(type(model).__name__, {name: aliases for aliases in names.values() for name in aliases})

    def covered(self, pattern: str, name: str) -> bool:
        """True if a pattern covers a module by one of its names. A pattern that is an existing name is not a glob."""
        names = self.all.get(name, (name,))
        if pattern in self.all:
            return any(f"{alias}.".startswith(f"{pattern}.") for alias in names)
        return any(_covers(pattern, alias) for alias in names)


def _has_weights(module: nn.Module) -> bool:
    """True if a module has tensors of its own in the state dict, or in a stack of 4-bit weights beside it."""
    buffers = (name for name in module._buffers if name not in module._non_persistent_buffers_set)
    tensors = (*module._parameters.values(), *map(module._buffers.get, buffers))
    return any(tensor is not None for tensor in tensors) or hasattr(type(module), "packed_weight")


def _covers(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return any(fnmatchcase(path, pattern) for path in (*parents(name), name))


def parents(name: str) -> list[str]:
    """Returns the names of the modules that hold a module, the outermost first."""
    return [name[:at] for at, letter in enumerate(name) if letter == "."]


def _patterns_of(value: object) -> Collection[str]:
    """Returns the patterns of an option, none of a function."""
    return [value] if isinstance(value, str) else value if isinstance(value, list | tuple | Mapping) else ()


def parse_patterns(option: str, value: Any, or_else: str = "") -> list[str]:
    """Returns the patterns of an option: one, or a list or tuple of them. `or_else`: other types that it takes.

    Raises:
        TypeError: the value is neither of these.
        ValueError: a pattern is empty, or a regular expression is not valid.
    """
    patterns = [value] if isinstance(value, str) else value
    if not isinstance(patterns, list | tuple) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"{option}: got {value!r}, wanted names or patterns of modules{or_else}")
    for pattern in patterns:
        if pattern in ("", "re:"):
            raise ValueError(
                f"{option}: got {pattern!r}, wanted a name, a glob such as '*.name' or 're:...'; '*' covers all"
            )
        if pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except re.error as error:
                raise ValueError(f"{option}: got {pattern!r}, wanted a regular expression ({error})") from error
    return list(patterns)


def select(option: str, value: Selection, names: Names) -> Callable[[nn.Module, str], bool]:
    """Returns an option, patterns or a function, as a function of a module and its name; raises as `parse_patterns`."""
    if callable(value):
        require_signature(option, value)
        return value
    patterns = parse_patterns(option, value, ", or a function of a module and its name")
    return lambda module, name: any(names.covered(pattern, name) for pattern in patterns)


class Selector:
    """The decision of the options `filter` and `ignore` on each module; raises as `parse_patterns`."""

    def __init__(self, names: Names, filter: Selection | None, ignore: Patterns | None) -> None:
        self._names = names
        self._takes = None if filter is None else select("filter", filter, names)
        or_else = "; a function is an option of `filter`"
        self._ignore = [] if ignore is None else parse_patterns("ignore", ignore, or_else)

    def declined(self, module: nn.Module, name: str) -> str | None:
        """Returns why a module stays in 16 bits, None if it is taken."""
        if self._takes is not None and not self._takes(module, name):
            return "filter declines it"
        pattern = self.ignored(name)
        return None if pattern is None else f"ignore has {pattern!r}"

    def ignored(self, name: str) -> str | None:
        """Returns the pattern of `ignore` that covers a module, None if there is none."""
        return next((pattern for pattern in self._ignore if self._names.covered(pattern, name)), None)


def check_patterns(
    names: Names,
    experts: Collection[str],
    dense: Collection[str],
    *,
    filter: Selection | None,
    ignore: Patterns | None,
    linears: bool | Selection | None = False,
    format: Format | None = None,
) -> None:
    """Raises a ValueError for a pattern of a user's options that fits nothing.

    Patterns of `filter` and `linears` have to fit a module that could be converted: one of `experts`, or of `dense`,
    which is empty without `linears`. Patterns of `ignore` and `format`, which people share between models, have to fit
    any module with weights.
    """
    candidates = [*experts, *dense]
    if dense:
        require_matches("linears", linears, names, dense, "dense layer")
    if candidates:
        require_matches("filter", filter, names, candidates, "experts or dense layers" if dense else "experts")
    for option, value in (("ignore", ignore), ("format", None if isinstance(format, str) else format)):
        require_matches(option, value, names)
        for pattern in _patterns_of(value):
            if pattern.startswith("re:") and not any(names.covered(pattern, name) for name in candidates):
                holders = dict.fromkeys(outer for name in candidates for outer in parents(name))
                whole = next((name for name in holders if names.covered(pattern, name)), None)
                if whole is not None:
                    raise ValueError(f"{option}: {pattern!r} fits {whole!r} alone, wanted one that fits what is in it")


def require_matches(
    option: str, value: object, names: Names, candidates: Iterable[str] | None = None, what: str = "module"
) -> None:
    """Raises a ValueError, with names that are close, for a pattern of an option that fits nothing.

    A pattern has to fit one of `candidates`, which `what` names; None: any module with weights.
    """
    known = [*(names.all if candidates is None else candidates)]
    for pattern in _patterns_of(value):
        if not any(names.covered(pattern, name) for name in known):
            if any(names.covered(pattern, name) for name in names.all):
                why = "fits modules of another kind, or converted already"
                raise ValueError(f"{option}: {pattern!r} {why}, wanted {what} of {names.where} to convert")
            kinds = dict.fromkeys(map(without_numbers, known))
            close = get_close_matches(without_numbers(pattern), kinds, n=3, cutoff=0)
            near = f"; close names are {', '.join(map(repr, close))}" if close else ""
            whole = "the whole name of one with weights" if candidates is None else "a whole name"
            raise ValueError(
                f"{option}: {pattern!r} fits no {what} of {names.where}, wanted {whole}, a pattern such as"
                f" '*.name' or 're:...'{near}"
            )


def format_function(format: Format, names: Names) -> Callable[[nn.Module, str], str | None]:
    """Returns the option `format` as a function of a module and its name, which returns a known format or None.

    The first pattern of a mapping that covers a module decides; modules that none covers become "nvfp4".

    Raises:
        ValueError: a format does not exist; the returned function raises it, too.
        TypeError: the option is neither a name, nor a mapping of patterns, nor a function.
    """
    if isinstance(format, str):
        known = find_format(format).name
        return lambda module, name: known
    if isinstance(format, Mapping):
        parse_patterns("format", [*format], " and their formats")
        formats = {key: None if value is None else find_format(value).name for key, value in format.items()}
        return lambda module, name: next(
            (value for pattern, value in formats.items() if names.covered(pattern, name)), "nvfp4"
        )
    if not callable(format) or isinstance(format, type):
        kind = format.__name__ if isinstance(format, type) else type(format).__name__
        got = repr(format) if type(format).__module__ == "builtins" else f"a {kind}"
        like = next((f": format={name!r} says it" for name in FORMATS if name in kind.lower()), "")
        raise TypeError(
            f"format: got {got}, wanted one of {tuple(FORMATS)}, a dictionary of patterns and formats, or a"
            f" function of a module and its name; configuration objects are not read{like}"
        )
    require_signature("format", format)

    def checked(module: nn.Module, name: str) -> str | None:
        chosen = format(module, name)
        if chosen is None:
            return None
        if not isinstance(chosen, str) or chosen.lower() not in FORMATS:
            raise ValueError(f"format: got {chosen!r} for {name!r}, wanted one of {tuple(FORMATS)}, or None")
        return chosen.lower()

    return checked


def require_signature(option: str, function: Callable[..., Any], first: str = "module") -> None:
    """Raises a TypeError for a function that does not take a module (or what `first` says) and its name."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions of C have none
        return
    try:
        signature.bind(None, "")
        names = (*signature.parameters, "", "")
        fits = names[0] not in ("name", "path", "fqn") and names[1] != first
    except TypeError:
        fits = False
    if not fits:
        raise TypeError(f"{option}: got a function of {signature}, wanted one that is called as f({first}, name)")


def without_numbers(name: str) -> str:
    """Returns a name with its numbers as ``*``."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def shortened(names: Iterable[str]) -> str:
    """Returns names in a line; names that differ only in their numbers become one with ``*`` and their count."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(without_numbers(name), []).append(name)
    return ", ".join(full[0] if len(full) == 1 else f"{name} ({len(full)})" for name, full in alike.items())
