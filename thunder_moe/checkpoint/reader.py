"""Reads NVFP4, MXFP8 and MXFP4 checkpoints: `Checkpoint` returns the experts of a layer as packed weights, dense
modules packed or in 16 bits, and all other tensors unchanged.
Called by integrations.huggingface and convert; calls files, formats.registry, modules and decode.

Pipeline: headers -> tensor names sorted into modules -> per layer: tensors of its experts copied to one packed weight.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from thunder_moe.checkpoint.decode import decode_dense, decode_experts
from thunder_moe.checkpoint.experts import UNSHARDED, ExpertsLayout, ExpertsPart, ExpertWeights
from thunder_moe.checkpoint.files import TensorFiles, TensorInfo, find_checkpoint, read_json
from thunder_moe.checkpoint.formats.fp8 import FP8, find_fp8
from thunder_moe.checkpoint.formats.interface import FLOATS, subdict
from thunder_moe.checkpoint.formats.registry import (
    check_quantization,
    find_quantization,
    format_of,
    has_mxfp8,
    is_fp8_alone,
)
from thunder_moe.checkpoint.modules import CACHE_FIELDS, Module, is_interleaved, sort_modules
from thunder_moe.formats.block_format import BlockFormat
from thunder_moe.formats.registry import dequantize
from thunder_moe.formats.weight import PackedWeight

Unit = tuple[TensorInfo, Callable[[], Any]]


class Checkpoint:
    """A checkpoint on disk, opened for reading module by module.

    Reads ModelOpt (per expert or fused; NVFP4, W4A16_NVFP4, MXFP8, and MIXED_PRECISION of these and FP8 dense layers),
    compressed-tensors (nvfp4-pack-quantized, mxfp8-quantized, also beside FP8 dense layers), MiniMax's MXFP8 and
    GPT-OSS's MXFP4; for conversions also experts in FP8. All headers are checked here; no weight is read yet.

    Args:
        path: a directory, or the name of a hub model that the local cache holds.
        argument: the name of the path in messages.

    Attributes:
        path: the directory.
        config: config.json.
        interleaved: the rows of fused gate_up projections alternate, by the model_type; may be changed.
        quantization: the quantization_config, or None.
        method: "modelopt", "compressed-tensors", "mxfp8" or "mxfp4", the form of the packed weights; "fp8" for a
            checkpoint that has FP8 weights alone, of any form; None for a 16-bit one.
        experts: paths of the 4-bit blocks of experts, in the order of the files.
        dense: path of each quantized module that is not an expert -> its tensors.
        others: names of the other tensors, without the scales of a quantized key-value cache.

    Raises:
        FileNotFoundError: the path has no checkpoint.
        ValueError: a truncated or inconsistent file, or an unsupported quantization; names the file.
    """

    def __init__(self, path: str | Path, *, argument: str = "path") -> None:
        self.path = find_checkpoint(path, argument=argument)
        file, modelopt = self.path / "config.json", self.path / "hf_quant_config.json"
        if not file.is_file():
            raise FileNotFoundError(f"{argument}: {self.path} has no config.json")
        self.config: dict[str, Any] = read_json(file)
        of_modelopt = read_json(modelopt) if modelopt.is_file() else None
        self.method: str | None = None
        self._fp8: FP8 | None = None
        try:
            self.quantization = find_quantization(self.config)
            if self.quantization is None and of_modelopt is not None:  # the only place of older versions of ModelOpt
                file = modelopt
                self.quantization = {"quant_method": "modelopt", **subdict(of_modelopt, "quantization")}
            if self.quantization is not None:
                self._fp8 = find_fp8(self.quantization)
                self.method = "fp8" if is_fp8_alone(self.quantization) else check_quantization(self.quantization)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
        self.interleaved = is_interleaved(self.config)
        self.files = TensorFiles(self.path, argument)
        modules = sort_modules(self.files)
        quantized = {path: block for path, block in modules.experts.items() if block.is_quantized}
        self.blocks = {path: block for path, block in quantized.items() if not block.is_fp8}
        self.dense = modules.dense
        # 16-bit blocks of experts, whose tensors are in `others`, too, and FP8 blocks: a conversion quantizes them.
        self.plain_blocks = {path: block for path, block in modules.experts.items() if not block.is_quantized}
        self.fp8_blocks = {path: block for path, block in quantized.items() if block.is_fp8}
        self._check_methods(
            [*(m for block in quantized.values() for m in block.modules.values()), *self.dense.values()]
        )
        plain = [info.name for block in self.plain_blocks.values() for info in block.infos()]
        self.others = modules.others + plain
        for name in self.others:
            if self.files[name].dtype.startswith("F8_"):
                raise self.files[name].error("is FP8, and by its name of no module that is known here")
            self.files[name].require_float()
        if self.method is not None:
            self.others = [name for name in self.others if name.rpartition(".")[2] not in CACHE_FIELDS]

    @property
    def experts(self) -> list[str]:
        return list(self.blocks)

    def layout(self, name: str) -> ExpertsLayout:
        """Return the layout of a layer's experts in this checkpoint, quantized or not."""
        return {**self.blocks, **self.plain_blocks, **self.fp8_blocks}[name].layout(self.interleaved)

    def require_4_bit_experts(self) -> None:
        """Raise a ValueError that names a tensor if experts are FP8, which only a conversion reads."""
        for block in self.fp8_blocks.values():
            info = next(module for module in block.modules.values() if module.is_fp8).fields["weight"]
            raise info.error(
                "is FP8, wanted 4-bit experts; `python -m thunder_moe convert SOURCE DESTINATION` makes them"
            )

    def read_experts(
        self, name: str, device: torch.device | str = "cpu", part: ExpertsPart = UNSHARDED
    ) -> ExpertWeights:
        """Read the experts of one layer, by their path, or only a part of them, as `decode_experts` does."""
        return decode_experts(self.files, self.blocks[name], self.interleaved, part).to(device)

    def is_4_bit(self, name: str) -> bool:
        """True if a module of `dense` is packed, for `read_dense_weight`; False if it is FP8."""
        return not self.dense[name].is_fp8

    def number_format(self, name: str) -> BlockFormat:
        """Return the number format of one of `experts`, or of one of `dense` that is not FP8."""
        block = self.blocks.get(name)
        return format_of(self.dense[name] if block is None else next(iter(block.modules.values()))).number_format

    def read_dense_weight(
        self, name: str, device: torch.device | str = "cpu", part: tuple[int, int, int] | None = None
    ) -> PackedWeight:
        """Return the packed weight (1, N, K), or a part, of a module of `dense`, as `decode_dense` does."""
        return decode_dense(self.files, self.dense[name], device, part)

    def read_dense(
        self, name: str, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """Return the dequantized weight (N, K) of a quantized module that is not an expert, by its path."""
        if not self.is_4_bit(name):
            return self.read_float(self.dense[name], device).to(dtype)
        return dequantize(self.read_dense_weight(name, device), dtype)[0]

    def read(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """Read one of `others`, unchanged."""
        return self.files.read(name).to(device, copy=True)

    def float_info(self, module: Module) -> TensorInfo:
        """Return the tensor of a 16-bit or FP8 weight, after a check of the fields and dtypes of its module."""
        if module.is_fp8:
            return self._fp8_of(module).infos(module)[0]
        (info,) = module.require("weight")
        info.require(FLOATS, None)
        return info

    def read_float(self, module: Module, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return a 16-bit weight in the file's dtype, or an FP8 one in float32; may be a view of the mapped file."""
        if module.is_fp8:
            return self._fp8_of(module).read(self.files, module, device)
        return self.files.read(self.float_info(module).name).to(device)

    def _fp8_of(self, module: Module) -> FP8:
        if self._fp8 is None:
            raise module.fields["weight"].error("is FP8, which the quantization_config does not say")
        return self._fp8

    def units(self, *, linears: bool = True, device: torch.device | str = "cpu") -> dict[str, Unit]:
        """Return functions that read each module and tensor, for a pass over the files with one layer in memory.

        Without `linears`, packed dense modules become bfloat16, on the device.

        Returns:
            name -> (one of its tensors, function that reads it): by path the ExpertWeights of each quantized block and
            the PackedWeight of each 4-bit dense module; by the name of the weight each dequantized module; and each
            other tensor.
        """
        units: dict[str, Unit] = {}
        for path, block in self.blocks.items():
            units[path] = block.any_info(), partial(self.read_experts, path)
        for path, module in self.dense.items():
            if linears and self.is_4_bit(path):
                units[path] = module.any_info(), partial(self.read_dense_weight, path)
            else:
                units[f"{path}.weight"] = module.any_info(), partial(self.read_dense, path, device=device)
        return units | {name: (self.files[name], partial(self.read, name)) for name in self.others}

    def _check_methods(self, quantized: list[Module]) -> None:
        """Raise a ValueError if the tensors of a quantized module are not of the form that the config names."""
        for module in quantized:
            if not module.is_quantized:
                continue
            info = module.any_info()
            if self.method is None:
                raise info.error("is quantized, but neither config.json nor hf_quant_config.json says how")
            if module.is_mxfp8:
                if not has_mxfp8(self.quantization or {}):
                    raise info.error("is MXFP8, which the quantization_config does not say")
                continue
            if module.is_fp8 and self._fp8 is None and has_mxfp8(self.quantization or {}):
                module.require("weight", module.mxfp8_scale_field)
            form = "fp8" if module.is_fp8 else format_of(module).method
            if form not in (self.method, "fp8"):
                raise info.error(f"is of the form of {form!r}, the quantization_config says {self.method!r}")
