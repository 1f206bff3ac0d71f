"""The configurations of both quantizers: `NVFP4CheckpointConfig` for packed checkpoints, `ThunderMoeConfig` for others.
Made by users, and by transformers from dictionaries; read by quantizer and on_load; calls selection to check patterns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from thunder_moe.checkpoint.formats.registry import check_quantization
from thunder_moe.formats.layouts import MODULE_LAYOUTS
from thunder_moe.formats.registry import check_scale_search
from thunder_moe.selection import Names, Patterns, format_function, parse_patterns

# Their names among transformers' methods.
METHOD, ON_LOAD = "thunder_moe", "thunder_moe_on_load"
_LAYOUTS = ("auto", *MODULE_LAYOUTS)


class NVFP4CheckpointConfig(QuantizationConfigMixin):
    """Hold the quantization config of a packed checkpoint, the dictionary of its config.json, as `source`.

    4-bit dense layers stay so if `linears`; else they are dequantized. A method, algorithm, format or block size that
    is not read here is a ValueError.
    """

    def __init__(self, source: dict[str, Any], *, linears: bool = True) -> None:
        check_quantization(source)
        self.quant_method: Any = METHOD
        self.source, self.linears = source, linears

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Return the config of a checkpoint's dictionary, which may be "source" in one of the method METHOD."""
        own = config_dict["quant_method"] == METHOD
        if own and "source" not in config_dict:
            raise ValueError(
                f"quant_method: got {METHOD!r}, this package's word for a checkpoint that is quantized already, wanted"
                f" ThunderMoeConfig(...), whose quant_method is {ON_LOAD!r}, to quantize a 16-bit one while it loads"
            )
        config = cls(config_dict["source"], linears=config_dict["linears"]) if own else cls(config_dict)
        return (config, kwargs) if return_unused_kwargs else config

    def to_dict(self) -> dict[str, Any]:
        return dict(self.source)


class ThunderMoeConfig(QuantizationConfigMixin):
    """Make ``from_pretrained`` quantize the experts of a 16-bit checkpoint to NVFP4 (or MXFP8) while it loads them.

    The model is bit for bit what `quantize_` with the same options makes of the loaded one, but its weights are
    quantized as they arrive: at no time are the experts of more than one layer in memory in 16 bits. Options are names
    and patterns of the model's modules, not functions, so that the configuration is JSON (``to_dict``, ``from_dict``).

    Args:
        filter: as in `quantize_`, but for functions.
        ignore: as in `quantize_`.
        linears: as in `quantize_`, but for functions.
        modules_to_not_convert: transformers' name for `ignore`; both count.
        format: as in `quantize_`, but for functions; a dictionary may be a list of its pairs. The "formats" of a file
            of ``python -m thunder_moe sensitivity --budget`` are such a dictionary.
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
        filter: Patterns | None = None,
        ignore: Patterns | None = None,
        linears: bool | Patterns = False,
        modules_to_not_convert: Patterns | None = None,
        format: str | Mapping[str, str | None] | Sequence[tuple[str, str | None]] = "nvfp4",
        scale_search: str | None = None,
        layout: str = "auto",
        quant_method: str = ON_LOAD,
    ) -> None:
        if quant_method != ON_LOAD:
            raise ValueError(f"quant_method: got {quant_method!r}, wanted {ON_LOAD!r}")
        self.quant_method: Any = ON_LOAD
        self.filter = None if filter is None else _patterns("filter", filter)
        self.linears: bool | list[str] = linears if isinstance(linears, bool) else _patterns("linears", linears)
        left = [("ignore", ignore), ("modules_to_not_convert", modules_to_not_convert)]
        self.ignore = [name for option, names in left if names is not None for name in _patterns(option, names)]
        try:
            self.format = format if isinstance(format, str) else dict(format)
        except (TypeError, ValueError) as error:
            wanted = "wanted a format, or a dictionary of patterns and formats"
            raise TypeError(f"format: got {format!r}, {wanted}") from error
        if not isinstance(format, str | Mapping) and len(self.format) != len(format):
            raise ValueError(f"format: got a pattern twice in {format!r}, wanted each once, since the first one counts")
        format_function(self.format, Names("", {}))  # checks it
        check_scale_search(scale_search, [self.format.lower()] if isinstance(self.format, str) else [])
        if layout not in _LAYOUTS:
            raise ValueError(f"layout: got {layout!r}, wanted one of {_LAYOUTS}")
        self.scale_search, self.layout = scale_search, layout

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as JSON takes it, with the formats as pairs: transformers sorts keys there."""
        pairs = self.format if isinstance(self.format, str) else [[*pair] for pair in self.format.items()]
        return {**super().to_dict(), "format": pairs}

    def options(self) -> dict[str, Any]:
        """Return the options of `choose.choose_modules`."""
        names = ("filter", "ignore", "linears", "format", "scale_search", "layout")
        return {name: getattr(self, name) for name in names}


def _patterns(option: str, value: Any) -> list[str]:
    why = " (a function cannot be saved with the model: load it in 16 bits and call quantize_)"
    return parse_patterns(option, value, why)
