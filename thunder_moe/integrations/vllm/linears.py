"""Run dense NVFP4 and MXFP8 layers of vLLM on our kernels, on a CPU and on Hopper.
Called by configs; calls ops.scaled_mm and loading.

Legend: N output features of this rank, K input features of this rank, P linears that are merged in one (q, k and v).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsScheme,
    CompressedTensorsW4A4Fp4,
    CompressedTensorsW8A8Mxfp8,
)
from vllm.model_executor.layers.quantization.modelopt import (
    SCHEME_FOR,
    CkptCtx,
    ModelOptLinearMethod,
    Role,
    RuntimeDtypes,
    Shapes,
    select_linear_kernel,
)
from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    amax_for_tp_weight_quant,
    kMxfp8Static,
    kNvfp4Static,
)
from vllm.platforms import current_platform

from thunder_moe.formats.block_format import MXFP8, NVFP4, BlockFormat
from thunder_moe.formats.weight import WEIGHTS
from thunder_moe.integrations.vllm.experts import FIELDS
from thunder_moe.integrations.vllm.graphs import decide, logger
from thunder_moe.integrations.vllm.loading import mark_unloaded, replace, require_decoded_scales, require_loaded
from thunder_moe.integrations.vllm.online import quantize_part
from thunder_moe.kernels.select import lay_out, runs_on_cuda
from thunder_moe.ops import scaled_mm  # noqa: F401  (registers the operator)

_BACKENDS = {NVFP4: ("nvfp4_w4a16", "nvfp4_w4a4"), MXFP8: ("mxfp8",)}
_MEASURED = (9, 0)


def dense_unsupported_reason(format: BlockFormat = NVFP4) -> str | None:
    """Return why dense layers of a number format do not run on our kernel; None if they do.

    On GPUs other than Hopper our kernel was not compared with vLLM's. vLLM also runs a --linear-backend that the user
    has named, and float32 on CUDA.
    """
    config = get_current_vllm_config_or_none()
    if config is not None:
        kernels = config.kernel_config
        asked = [(kernels.linear_backend_per_quant or {}).get(name) for name in _BACKENDS[format]]
        for backend in (kernels.linear_backend, *asked):
            if backend not in (None, "auto"):
                return f"--linear-backend {backend} was asked for"
    if current_platform.is_cpu():
        return None
    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
    if capability is None or tuple(capability) != _MEASURED:
        return "they were measured beside vLLM's on CPUs and on GPUs of compute capability 9.0 alone"
    if config is not None and config.model_config is not None and config.model_config.dtype.itemsize > 2:
        return f"activations are {config.model_config.dtype}"
    if not runs_on_cuda(torch.device("cuda"), format.name):
        return "the CUDA kernels cannot be compiled, see kernels.cuda.nvrtc"
    return None


def modelopt_linear_method(method: Any) -> Any:
    """Return our method for a dense layer in place of vLLM's, or vLLM's `method` of any other layer, or None."""
    if type(method) is not ModelOptLinearMethod or method.spec.weight not in (kNvfp4Static, kMxfp8Static):
        return method
    kind = ModelOptThunderLinearMethod
    if method.spec.weight == kMxfp8Static:
        kind = ModelOptThunderMxFp8LinearMethod
    return kind(method.spec, method.ctx, method.fmt) if _runs(kind._format) else method


def compressed_tensors_scheme(format: BlockFormat, inputs: Any, layer_name: str) -> CompressedTensorsScheme | None:
    """Return our scheme for a dense layer of compressed-tensors, or None if vLLM runs it. Our activations are 16-bit,
    with or without a quantization of the checkpoint's `inputs`."""
    if not _runs(format):
        return None
    return ThunderNvfp4Scheme(inputs is None, layer_name) if format is NVFP4 else ThunderMxFp8Scheme(layer_name)


def _runs(format: BlockFormat) -> bool:
    return decide("dense layers", format.name, dense_unsupported_reason(format))


class _Dense:
    """The packing of a layer's loaded weight, and the product with it."""

    layout: str
    _format = NVFP4
    _fields = FIELDS[NVFP4]  # the names of the checkpoint's tensors
    _operator = "f16a_nvfp4weight_scaled_mm"

    def pack(self, layer: Any, layer_name: str) -> None:
        """Puts the loaded weight of vLLM's LinearBase into the layout of the device's kernel."""
        require_loaded(layer, layer_name, "rows", *self._fields[:2])
        require_loaded(layer, layer_name, "merged linears", *self._fields[2:])
        scales = self._global_scales(layer, layer_name)
        tensors = (layer.weight.data[None], layer.weight_scale.data.view(self._format.scale_dtype)[None], *scales)
        weight = lay_out(WEIGHTS[self._format.name](*tensors), "auto")
        self.layout = weight.layout
        for name, tensor in zip(FIELDS[self._format], weight.tensors(), strict=True):
            replace(layer, layer_name, name, tensor[0])  # E8M0, no bytes: in a graph a view of another dtype is a copy

    def _global_scales(self, layer: Any, layer_name: str) -> tuple[Tensor, ...]:
        """Return the decode scales (1,), or (1, N) if linears are merged; vLLM's own kernels take the largest for all.

        Their shape does not depend on their values: a reload may bring scales that differ, in the same memory."""
        scales: Tensor = layer.weight_scale_2.data.float()
        if scales.numel() > 1:
            widths = torch.tensor(layer.logical_widths, device=scales.device)
            scales = scales.repeat_interleave(widths, output_size=layer.weight.shape[0])[None]
        return (scales.contiguous(),)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply x (..., K) by the weight -> (..., N)."""
        scales = [layer.weight_scale] if self._format is MXFP8 else [layer.weight_scale, layer.weight_scale_2]
        operator = getattr(torch.ops.thunder_moe, self._operator)
        return operator(x, layer.weight.t(), *scales, bias, layout=self.layout)


class _MxFp8Dense(_Dense):
    """`_Dense` in MXFP8, which has no global scale."""

    _format = MXFP8
    _fields = FIELDS[MXFP8]
    _operator = "f16a_mxfp8weight_scaled_mm"

    def _global_scales(self, layer: Any, layer_name: str) -> tuple[Tensor, ...]:
        if current_platform.is_cuda():
            require_decoded_scales(layer, layer_name, "weight_scale")
        return ()


@register_weight_loader_v2_supported_method
class ModelOptThunderLinearMethod(_Dense, ModelOptLinearMethod):  # type: ignore[misc]
    """The method for ModelOpt's checkpoints, with vLLM's parameters. vLLM's loaders look for "ModelOpt" in its name."""

    supports_pre_processed_weights = False

    def create_weights(
        self, layer: Any, input_size_per_partition: int, output_partition_sizes: list[int], input_size: int,
        output_size: int, params_dtype: torch.dtype, **extra_weight_attrs: Any,
    ) -> None:  # fmt: skip
        """Create vLLM's parameters, without a kernel of vLLM."""
        layer.logical_widths = output_partition_sizes
        layer.input_size_per_partition = input_size_per_partition
        layer.output_size_per_partition = sum(output_partition_sizes)
        shapes = Shapes(output_partition_sizes, input_size_per_partition, params_dtype)
        loader = extra_weight_attrs.get("weight_loader")
        self.wkey.create_weights(layer, Role.WEIGHT, self.ctx, shapes, loader)
        if self.akey is not None:
            self.akey.create_weights(layer, Role.ACT, self.ctx, shapes, loader)
        self.fmt.extra_weights(layer, shapes, self.ctx, loader)
        mark_unloaded(layer, *self._fields)  # for `pack`

    def process_weights_after_loading(self, layer: Any) -> None:
        if _is_read_by_its_model(layer):
            self.leave_to_vllm(layer)
        else:
            self.pack(layer, _name(layer))

    def leave_to_vllm(self, layer: Any) -> None:
        """Lets vLLM's method, with the kernel that vLLM chooses, run a layer whose parameters are loaded.

        Raises:
            ValueError: vLLM has no kernel for it.
        """
        logger.info_once("Its model reads the weight of %s itself: vLLM's own kernels run it.", _name(layer))
        method = ModelOptLinearMethod(self.spec, self.ctx, self.fmt)
        method.input_dtype, method.out_dtype = self.input_dtype, self.out_dtype
        dtypes = RuntimeDtypes(method.input_dtype, method.out_dtype, method.marlin_input_dtype)
        shape = self.fmt.kernel_weight_shape(layer)
        method.kernel = select_linear_kernel(self.spec, layer, dtypes, weight_shape=shape)
        layer.quant_method = method
        method.process_weights_after_loading(layer)

    def _global_scales(self, layer: Any, layer_name: str) -> tuple[Tensor, ...]:
        if hasattr(layer, "input_scale"):  # the scale of 4-bit activations, which are not used
            del layer.input_scale
        return super()._global_scales(layer, layer_name)


@register_weight_loader_v2_supported_method
class ModelOptThunderMxFp8LinearMethod(_MxFp8Dense, ModelOptThunderLinearMethod):
    """The method for ModelOpt's checkpoints in MXFP8."""


@register_weight_loader_v2_supported_method
class ThunderOnlineLinearMethod(_Dense, OnlineLinearBase):  # type: ignore[misc]
    """The method for dense layers of 16-bit checkpoints, which are quantized to NVFP4 whenever vLLM has loaded one.

    Raises:
        ValueError: Our kernels cannot run dense layers.
    """

    _fields = ("weight",)

    def __init__(self) -> None:
        super().__init__()
        if (reason := dense_unsupported_reason(NVFP4)) is not None:
            raise ValueError(f"linears: got dense layers, which cannot become NVFP4: {reason}; leave linears out")
        decide("dense layers", NVFP4.name, None)

    def create_weights(self, layer: Any, input_size_per_partition: int, *args: Any, **options: Any) -> None:
        """Create vLLM's 16-bit parameter, on meta until the layer is loaded."""
        _check_blocks(_name(layer), input_size_per_partition, NVFP4)
        super().create_weights(layer, input_size_per_partition, *args, **options)

    def process_weights_after_loading(self, layer: Any) -> None:
        if _is_read_by_its_model(layer):
            raise ValueError(f"linears: got {_name(layer)!r}, whose weight its model reads itself; leave it out")
        layer.quant_config.require_matches()
        if not getattr(layer, "_already_called_process_weights_after_loading", False):
            self.pack(layer, _name(layer))
            layer._already_called_process_weights_after_loading = True

    def _global_scales(self, layer: Any, layer_name: str) -> tuple[Tensor, ...]:
        """Quantize the weight, merged linears with one global scale like `quantize_`; give it a checkpoint's places."""
        largest = partial(amax_for_tp_weight_quant, is_sharded=True) if layer.tp_size > 1 else None
        packed = quantize_part(layer.weight.data[None], largest)
        for name, tensor in (("weight", packed.qdata), ("weight_scale", packed.scale)):
            setattr(layer, name, torch.nn.Parameter(tensor[0], requires_grad=False))
        return (packed.global_scale,)


class _Scheme(_Dense):
    """The base of the schemes for compressed-tensors, which vLLM asks for what it asks a method."""

    layer_name: str

    def process_weights_after_loading(self, layer: Any) -> None:
        if _is_read_by_its_model(layer):
            raise NotImplementedError(
                f"{self.layer_name!r}: its model reads the weight itself, which the kernels of thunder_moe reorder;"
                " name one of vLLM's by --linear-backend, or set THUNDER_MOE_VLLM=0"
            )
        self.pack(layer, self.layer_name)

    apply_weights = _Dense.apply


class ThunderNvfp4Scheme(_Scheme, CompressedTensorsW4A4Fp4):  # type: ignore[misc]
    """The scheme for compressed-tensors in NVFP4, whose global scales encode: their inverse multiplies."""

    _fields = ("weight_packed", "weight_scale", "weight_global_scale")

    def __init__(self, use_a16: bool, layer_name: str) -> None:
        self.use_a16, self.layer_name, self.group_size = use_a16, layer_name, 16
        self.kernel = _NoKernel()

    def create_weights(
        self, layer: Any, output_partition_sizes: list[int], input_size_per_partition: int, *args: Any, **options: Any
    ) -> None:
        _check_blocks(self.layer_name, input_size_per_partition, NVFP4)
        super().create_weights(layer, output_partition_sizes, input_size_per_partition, *args, **options)
        mark_unloaded(layer, *self._fields)  # for `pack`

    def _global_scales(self, layer: Any, layer_name: str) -> tuple[Tensor, ...]:
        """Give the parameters ModelOpt's names and decode scales."""
        layer.weight = torch.nn.Parameter(layer.weight_packed.data, requires_grad=False)
        layer.weight_scale_2 = torch.nn.Parameter(1 / layer.weight_global_scale.data, requires_grad=False)
        for name in ("weight_packed", "weight_global_scale", "input_global_scale"):
            if hasattr(layer, name):
                delattr(layer, name)
        return super()._global_scales(layer, layer_name)


class ThunderMxFp8Scheme(_MxFp8Dense, _Scheme, CompressedTensorsW8A8Mxfp8):  # type: ignore[misc]
    """The scheme for compressed-tensors in MXFP8, which has ModelOpt's names."""

    def __init__(self, layer_name: str) -> None:
        self.layer_name = layer_name

    def create_weights(
        self, layer: Any, output_partition_sizes: list[int], input_size_per_partition: int,
        params_dtype: torch.dtype, weight_loader: Any, **options: Any,
    ) -> None:  # fmt: skip
        """Create vLLM's parameters, without a kernel of vLLM."""
        _check_blocks(self.layer_name, input_size_per_partition, MXFP8)
        layer.logical_widths, layer.params_dtype = output_partition_sizes, params_dtype
        layer.input_size_per_partition = input_size_per_partition
        layer.output_size_per_partition = sum(output_partition_sizes)
        shapes = Shapes(output_partition_sizes, input_size_per_partition, params_dtype)
        SCHEME_FOR[kMxfp8Static].create_weights(layer, Role.WEIGHT, CkptCtx(), shapes, weight_loader)
        mark_unloaded(layer, *self._fields)  # for `pack`


def _is_read_by_its_model(layer: Any) -> bool:
    """True if the code of a model reads the layer's weight itself, which the model has marked so."""
    return bool(getattr(layer, "_retain_weight_for_gather", False) or getattr(layer, "is_bmm", False))


class _NoKernel:
    """A stand-in for vLLM's kernel, which vLLM's class asks for the format of inputs: 16 bits."""

    def input_quant_key(self) -> None:
        return None


def _check_blocks(layer_name: str, k: int, format: BlockFormat) -> None:
    """Raises a ValueError if a rank's input features are not whole blocks, like vLLM's methods for ModelOpt."""
    if k % format.block_size:
        raise ValueError(
            f"{layer_name!r}: got {k} input features on this rank, wanted a multiple of {format.block_size}:"
            " take another --tensor-parallel-size"
        )


def _name(layer: Any) -> str:
    return str(getattr(layer, "prefix", "") or type(layer).__name__)
