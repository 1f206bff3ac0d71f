"""`ThunderMoeConfig`: how ``from_pretrained(..., quantization_config=)`` quantizes a 16-bit checkpoint while it loads.
Made by users, and by transformers from a dictionary; read by on_load; calls formats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from thunder_moe.formats.layouts import MODULE_LAYOUTS
from thunder_moe.formats.nvfp4 import SCALE_SEARCHES
from thunder_moe.formats.registry import FORMATS

try:
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError as error:
    raise ImportError("ThunderMoeConfig needs transformers >= 5.7: pip install 'thunder_moe[transformers]'") from error

__all__ = ["ON_LOAD", "ThunderMoeConfig"]

ON_LOAD = "thunder_moe_on_load"  # its name among transformers' methods
_LAYOUTS = ("auto", *MODULE_LAYOUTS)
_Filter = Callable[[nn.Module, str], bool]


class ThunderMoeConfig(QuantizationConfigMixin):
    """Makes ``from_pretrained`` quantize the experts of a 16-bit checkpoint to NVFP4 (or MXFP8) while it loads them.

    The model is bit for bit what `quantize_` with the same options makes of the loaded one, but its weights are
    quantized as they arrive: at no time are the experts of more than one layer in memory in 16 bits. Options are
    strings, so that the configuration is JSON (``to_dict``, ``from_dict``); names are those of the model's modules,
    with ``*``, ``?`` and ``[...]`` as in a shell, where ``*`` takes dots, too.

    Args:
        filter: names of the experts to quantize; None: all.
        linears: whether dense layers become 4-bit, too: True for those that are faster then, or the names of those that
            shall (as `quantize_` takes a function).
        modules_to_not_convert: names of experts and dense layers that stay 16-bit.
        format: "nvfp4" or "mxfp8"; or a dictionary of names of modules and their formats, None for 16 bits, of which
            the first that fits counts (``{"*.layers.0.*": "mxfp8", "*": "nvfp4"}``); what none fits becomes "nvfp4".
            The "formats" of a file of ``python -m thunder_moe sensitivity --budget`` are such a dictionary.
        scale_search: as in `quantize_`.
        layout: as in `quantize_`.
        quant_method: this one's name, as dictionaries have it.

    Raises:
        TypeError: an option of another type.
        ValueError: another `quant_method`, format, scale_search or layout than there are.
    """

    def __init__(
        self,
        *,
        filter: str | Sequence[str] | None = None,
        linears: bool | str | Sequence[str] = False,
        modules_to_not_convert: str | Sequence[str] | None = None,
        format: str | Mapping[str, str | None] = "nvfp4",
        scale_search: str | None = None,
        layout: str = "auto",
        quant_method: str = ON_LOAD,
    ) -> None:
        if quant_method != ON_LOAD:
            raise ValueError(f"quant_method: got {quant_method!r}, wanted {ON_LOAD!r}")
        self.quant_method: Any = ON_LOAD
        self.filter = None if filter is None else _names("filter", filter)
        self.linears: bool | list[str] = linears if isinstance(linears, bool) else _names("linears", linears)
        left = modules_to_not_convert
        self.modules_to_not_convert = None if left is None else _names("modules_to_not_convert", left)
        if not isinstance(format, str | Mapping) or not all(isinstance(name, str) for name in format):
            raise TypeError(
                f"format: got {format!r}, wanted the name of a format, or a dictionary of names of modules and formats"
            )
        of_names = () if isinstance(format, str) else tuple(name for name in format.values() if name is not None)
        for name in (format,) if isinstance(format, str) else of_names:
            if name not in tuple(FORMATS):
                raise ValueError(f"format: got {name!r}, wanted one of {tuple(FORMATS)}")
        if scale_search is not None and scale_search not in SCALE_SEARCHES:
            raise ValueError(f"scale_search: got {scale_search!r}, wanted None or one of {SCALE_SEARCHES}")
        if layout not in _LAYOUTS:
            raise ValueError(f"layout: got {layout!r}, wanted one of {_LAYOUTS}")
        self.format: str | dict[str, str | None] = format if isinstance(format, str) else dict(format)
        self.scale_search, self.layout = scale_search, layout

    def options(self) -> dict[str, Any]:
        """The options of `quantize.choose_modules`."""
        excluded = self.modules_to_not_convert or []

        def taking(names: list[str] | None) -> _Filter:
            return lambda module, name: (names is None or _match(name, names)) and not _match(name, excluded)

        return dict(
            filter=taking(self.filter),
            linears=self.linears if isinstance(self.linears, bool) else taking(self.linears),
            kept_linears=lambda module, name: _match(name, excluded),
            format=self.format if isinstance(self.format, str) else self._format_of,
            scale_search=self.scale_search,
            layout=self.layout,
        )

    def _format_of(self, name: str, module: nn.Module) -> str | None:
        assert not isinstance(self.format, str)
        return next((format for names, format in self.format.items() if fnmatchcase(name, names)), "nvfp4")

    def check_names(self, model: nn.Module) -> None:
        """Raises a ValueError that names what is the name of no module."""
        modules = [name for name, _ in model.named_modules(remove_duplicate=False)]
        linears = [] if isinstance(self.linears, bool) else self.linears
        for option, names in (
            ("filter", self.filter or []),
            ("linears", linears),
            ("modules_to_not_convert", self.modules_to_not_convert or []),
            ("format", [] if isinstance(self.format, str) else self.format),
        ):
            for name in names:
                if not any(fnmatchcase(module, name) for module in modules):
                    some = next((module for module in modules if module.endswith("experts")), modules[-1])
                    raise ValueError(
                        f"{option}: {name!r} is the name of no module of {type(model).__name__}; names are whole, such"
                        f" as {some!r} or '*.{some.rpartition('.')[2]}'"
                    )


def _names(option: str, value: Any) -> list[str]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"{option}: got {value!r}, wanted names of modules (a function cannot be saved with the model: load it in"
            " 16 bits and call quantize_)"
        )
    return list(names)


def _match(name: str, names: list[str]) -> bool:
    return any(fnmatchcase(name, one) for one in names)
