"""The CUDA kernels' argument structs as ctypes: each has the name and the fields of a C++ struct in src/.
Called by the other modules of kernels/cuda; nvrtc.py asserts that both agree whenever it compiles a kernel.

Names of padding, which the C++ structs do not name, end in an underscore.
"""

from __future__ import annotations

import ctypes
from typing import Any

_Fields = tuple[tuple[str, Any], ...]


def _pointers(names: str) -> _Fields:
    return tuple((name, ctypes.c_void_p) for name in names.split())


def _ints(names: str) -> _Fields:
    return tuple((name, ctypes.c_int) for name in names.split())


def _longs(names: str) -> _Fields:
    return tuple((name, ctypes.c_int64) for name in names.split())


def _floats(names: str) -> _Fields:
    return tuple((name, ctypes.c_float) for name in names.split())


def _with_maps(names: str, fields: _Fields) -> _Fields:
    """Return tensor maps of 128 bytes, then fields, padded to the alignment of a map, 64 bytes."""
    rest = type("_Rest", (ctypes.Structure,), {"_fields_": fields})
    padding = ("padding_", ctypes.c_byte * (-ctypes.sizeof(rest) % 64))
    return (*((name, ctypes.c_byte * 128) for name in names.split()), *fields, padding)


class GemmArguments(ctypes.Structure):  # in grouped_mm.cuh
    _fields_ = (
        *_pointers("x qdata scale global_scale offsets row_slot slot_scale bias out partial_sums semaphores row_sums"),
        *_ints("rows num_experts n k top_k global_per_row slot_scale_dtype bias_dtype"),
        *_floats("alpha limit up_shift"),
        *_pointers("tile_counter"),
        *_ints("read_once row_tiles x_from_previous_kernel"),
    )


class DirectArguments(ctypes.Structure):  # in tiled_direct.cu
    _fields_ = (("gemm", GemmArguments), *_pointers("residual norm_weight total"), *_floats("epsilon"))


class TmaGemmArguments(ctypes.Structure):  # in tiled_wgmma.cu
    _fields_ = _with_maps("x", (("gemm", GemmArguments),))


class LowRankGemmArguments(ctypes.Structure):  # in tiled_wgmma.cu
    _fields_ = _with_maps("x inner", (("gemm", GemmArguments), *_pointers("b"), *_ints("rank")))


class GatherArguments(ctypes.Structure):  # in grouped_mm.cuh
    _fields_ = (*_pointers("x row_slot out end"), *_ints("rows k top_k"))


class RouteArguments(ctypes.Structure):  # in route.cu
    _fields_ = (
        *_pointers("expert_ids counts row_slot offsets slot_row"),
        *_ints("slots num_experts wide_ids slots_per_block"),
    )


class RouterArguments(ctypes.Structure):  # in router.cu
    _fields_ = (
        *_pointers("logits bias scores expert_ids counts row_slot offsets slot_row"),
        *_ints("tokens num_experts top_k tokens_per_block logits_dtype bias_dtype scores_dtype"),
        *_ints("sigmoid normalize num_groups top_groups group_best mask_to_zero lanes_per_group"),
        *_floats("epsilon least_sum scale"),
    )


class RouterLinearArguments(ctypes.Structure):  # in router.cu
    _fields_ = (
        ("router", RouterArguments),
        *_pointers("x weight bias words"),
        *_ints("hidden_size prefetch"),
        *_pointers("residual norm_weight total normalized"),
        *_floats("epsilon"),
    )


class CombineArguments(ctypes.Structure):  # in route.cu
    _fields_ = (
        *_pointers("rows slot_row slot_weight out"),
        *_ints("num_rows tokens top_k n slot_weight_dtype rows_from_previous_kernel"),
    )


class RowStartsArguments(ctypes.Structure):  # in route.cu
    _fields_ = (*_pointers("offsets starts"), *_ints("num_experts rows"))


class SwigluArguments(ctypes.Structure):  # in swiglu.cu
    _fields_ = (
        *_pointers("gate_up offsets row_slot slot_scale bias out"),
        *_ints("rows num_experts features slot_scale_dtype bias_dtype"),
        *_floats("alpha limit up_shift"),
    )


class DecodeAttentionArguments(ctypes.Structure):  # in decode_attention.cu
    _fields_ = (
        *_pointers("query key value key_cache value_cache position mask cos sin query_norm key_norm out"),
        *_longs("query_stride key_stride value_stride mask_stride angle_stride"),
        *_ints("key_heads groups length bool_mask prefetch"),
        *_floats("epsilon scale"),
    )


class DequantizeArguments(ctypes.Structure):  # in dequantize.cu
    _fields_ = (*_pointers("qdata scale global_scale out offsets"), *_longs("rows"), *_ints("rows_per_global k n"))


class QuantizeArguments(ctypes.Structure):  # in quantize.cu
    _fields_ = (
        *_pointers("weight codes scales scale_map amax qdata scale global_scale sums"),
        *_ints("n k blocks_per_expert"),
    )


class ActivationArguments(ctypes.Structure):  # in activation.cu
    _fields_ = (
        *_pointers("y scales offsets grad out grad_scales value"),
        *_longs("rows"),
        *_ints("features num_experts wide_offsets scales_dtype interleave"),
        *_floats("alpha limit up_shift"),
    )


class BiasArguments(ctypes.Structure):  # in bias.cu
    _fields_ = (
        *_pointers("rows_in offsets scale bias partial_sums out scales"),
        *_ints("rows num_experts n wide_offsets scale_dtype scales_dtype keep_tail block_columns"),
    )


class RecipeArguments(ctypes.Structure):  # in recipes.cu
    _fields_ = (
        *_pointers("values ends out scales amax progress code_ends"),
        *_longs("rows code_rows"),
        *_ints("columns num_experts group_rows lead"),
    )


class WgradArguments(ctypes.Structure):  # in wgrad.cuh
    _fields_ = (
        *_pointers("grad x offsets out"),
        *_ints("rows first_expert num_experts n k wide_offsets accumulate narrow_out"),
    )


class TmaWgradArguments(ctypes.Structure):  # in wgrad_wgmma.cu
    _fields_ = _with_maps("grad x", (("of", WgradArguments),))


class ScaledWgradArguments(ctypes.Structure):  # in wgrad_wgmma.cu
    _fields_ = _with_maps("grad x", (("of", WgradArguments), *_pointers("grad_scale x_scale")))


class LinearArguments(ctypes.Structure):  # in linear.cuh
    _fields_ = (*_pointers("x weight offsets out"), *_ints("rows first_expert num_experts n k wide_offsets zero_tail"))


class TmaLinearArguments(ctypes.Structure):  # in linear_wgmma.cu
    _fields_ = _with_maps("weight x", (("of", LinearArguments),))


class ScaledLinearArguments(ctypes.Structure):  # in linear_wgmma.cu
    _fields_ = _with_maps("weight x", (("of", LinearArguments), *_pointers("row_scale column_scale")))


class GatherLowRankArguments(ctypes.Structure):  # in gather_low_rank.cu
    _fields_ = (("of", LinearArguments), *_pointers("row_slot gathered"), *_ints("top_k"))


class RankWgradArguments(ctypes.Structure):  # in rank_wgrad.cu
    _fields_ = (("of", WgradArguments), *_pointers("row_slot"), *_ints("top_k"))


class LowRankLinearArguments(ctypes.Structure):  # in linear_wgmma.cu
    _fields_ = _with_maps("weight x b inner", (("of", LinearArguments), *_ints("rank")))


class PackedLinearArguments(ctypes.Structure):  # in packed_wgmma.cu
    _fields_ = _with_maps(
        "x b inner", (("of", LinearArguments), *_pointers("qdata scale global_scale"), *_ints("rank"))
    )
