"""The CUDA kernels' argument structs as ctypes: each has the name and the fields of a C++ struct in src/.
Called by the other modules of kernels/cuda; nvrtc.py asserts that both agree whenever it compiles a kernel.
"""

from __future__ import annotations

import ctypes

__all__ = [
    "ActivationArguments",
    "BiasArguments",
    "CombineArguments",
    "DecodeAttentionArguments",
    "DequantizeArguments",
    "DirectArguments",
    "GatherArguments",
    "GatherLowRankArguments",
    "GemmArguments",
    "LinearArguments",
    "LowRankGemmArguments",
    "LowRankLinearArguments",
    "PackedLinearArguments",
    "QuantizeArguments",
    "RankWgradArguments",
    "RecipeArguments",
    "RouteArguments",
    "RouterArguments",
    "RouterLinearArguments",
    "RowStartsArguments",
    "ScaledLinearArguments",
    "ScaledWgradArguments",
    "SwigluArguments",
    "TmaGemmArguments",
    "TmaLinearArguments",
    "TmaWgradArguments",
    "WgradArguments",
]


class GemmArguments(ctypes.Structure):
    """The argument struct of the grouped GEMMs, in grouped_mm.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "qdata", "scale", "global_scale", "offsets")),
        *((name, ctypes.c_void_p) for name in ("row_slot", "slot_scale", "bias", "out")),
        *((name, ctypes.c_void_p) for name in ("partial_sums", "semaphores", "row_sums")),
        *((name, ctypes.c_int) for name in ("rows", "num_experts", "n", "k", "top_k")),
        *((name, ctypes.c_int) for name in ("global_per_row", "slot_scale_dtype", "bias_dtype")),
        *((name, ctypes.c_float) for name in ("alpha", "limit", "up_shift")),
        ("tile_counter", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("read_once", "x_from_previous_kernel")),
    )


class DirectArguments(ctypes.Structure):
    """In tiled_direct.cu."""

    _fields_ = (
        ("gemm", GemmArguments),
        *((name, ctypes.c_void_p) for name in ("residual", "norm_weight", "total")),
        ("epsilon", ctypes.c_float),
    )


class TmaGemmArguments(ctypes.Structure):
    """In tiled_wgmma.cu, aligned to the 64 bytes of its tensor map."""

    _fields_ = (
        ("x", ctypes.c_byte * 128),
        ("gemm", GemmArguments),
        ("padding_", ctypes.c_byte * (-ctypes.sizeof(GemmArguments) % 64)),
    )


class LowRankGemmArguments(ctypes.Structure):
    """In tiled_wgmma.cu, aligned to the 64 bytes of its tensor maps."""

    _fields_ = (
        *((name, ctypes.c_byte * 128) for name in ("x", "inner")),
        ("gemm", GemmArguments),
        ("b", ctypes.c_void_p),
        ("rank", ctypes.c_int),
        ("padding_", ctypes.c_byte * (-(ctypes.sizeof(GemmArguments) + 12) % 64)),
    )


class GatherArguments(ctypes.Structure):
    """In grouped_mm.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "row_slot", "out", "end")),
        *((name, ctypes.c_int) for name in ("rows", "k", "top_k")),
    )


class RouteArguments(ctypes.Structure):
    """In route.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("expert_ids", "counts", "row_slot", "offsets", "slot_row")),
        *((name, ctypes.c_int) for name in ("slots", "num_experts", "wide_ids", "slots_per_block")),
    )


class RouterArguments(ctypes.Structure):
    """In router.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "bias", "scores", "expert_ids")),
        *((name, ctypes.c_void_p) for name in ("counts", "row_slot", "offsets", "slot_row")),
        *((name, ctypes.c_int) for name in ("tokens", "num_experts", "top_k", "tokens_per_block")),
        *((name, ctypes.c_int) for name in ("logits_dtype", "bias_dtype", "scores_dtype")),
        *((name, ctypes.c_int) for name in ("sigmoid", "normalize", "num_groups", "top_groups")),
        *((name, ctypes.c_int) for name in ("group_best", "mask_to_zero", "lanes_per_group")),
        *((name, ctypes.c_float) for name in ("epsilon", "least_sum", "scale")),
    )


class RouterLinearArguments(ctypes.Structure):
    """In router.cu."""

    _fields_ = (
        ("router", RouterArguments),
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "words")),
        *((name, ctypes.c_int) for name in ("hidden_size", "prefetch")),
        *((name, ctypes.c_void_p) for name in ("residual", "norm_weight", "total", "normalized")),
        ("epsilon", ctypes.c_float),
    )


class CombineArguments(ctypes.Structure):
    """In route.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "slot_row", "slot_weight", "out")),
        *(
            (name, ctypes.c_int)
            for name in ("num_rows", "tokens", "top_k", "n", "slot_weight_dtype", "rows_from_previous_kernel")
        ),
    )


class RowStartsArguments(ctypes.Structure):
    """In route.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("offsets", "starts")),
        *((name, ctypes.c_int) for name in ("num_experts", "rows")),
    )


class SwigluArguments(ctypes.Structure):
    """In swiglu.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("gate_up", "offsets", "row_slot", "slot_scale")),
        *((name, ctypes.c_void_p) for name in ("bias", "out")),
        *((name, ctypes.c_int) for name in ("rows", "num_experts", "features", "slot_scale_dtype", "bias_dtype")),
        *((name, ctypes.c_float) for name in ("alpha", "limit", "up_shift")),
    )


class DecodeAttentionArguments(ctypes.Structure):
    """In decode_attention.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "key_cache", "value_cache", "position")),
        *((name, ctypes.c_void_p) for name in ("mask", "cos", "sin", "query_norm", "key_norm", "out")),
        *((name, ctypes.c_int64) for name in ("query_stride", "key_stride", "value_stride")),
        *((name, ctypes.c_int64) for name in ("mask_stride", "angle_stride")),
        *((name, ctypes.c_int) for name in ("key_heads", "groups", "length", "bool_mask", "prefetch")),
        *((name, ctypes.c_float) for name in ("epsilon", "scale")),
    )


class DequantizeArguments(ctypes.Structure):
    """In dequantize.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qdata", "scale", "global_scale", "out", "offsets")),
        ("rows", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("rows_per_global", "k", "n")),
        ("padding_", ctypes.c_byte * 4),
    )


class QuantizeArguments(ctypes.Structure):
    """In quantize.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "codes", "scales", "scale_map")),
        *((name, ctypes.c_void_p) for name in ("amax", "qdata", "scale", "global_scale")),
        *((name, ctypes.c_int) for name in ("n", "k", "blocks_per_expert")),
    )


class ActivationArguments(ctypes.Structure):
    """In activation.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("y", "scales", "offsets", "grad", "out", "grad_scales", "value")),
        ("rows", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("features", "num_experts", "wide_offsets", "scales_dtype", "interleave")),
        *((name, ctypes.c_float) for name in ("alpha", "limit", "up_shift")),
    )


class BiasArguments(ctypes.Structure):
    """In bias.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows_in", "offsets", "scale", "bias", "partial_sums", "out", "scales")),
        *((name, ctypes.c_int) for name in ("rows", "num_experts", "n")),
        *(
            (name, ctypes.c_int)
            for name in ("wide_offsets", "scale_dtype", "scales_dtype", "keep_tail", "block_columns")
        ),
    )


class RecipeArguments(ctypes.Structure):
    """In recipes.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("values", "ends", "out", "scales", "amax", "progress", "code_ends")),
        *((name, ctypes.c_int64) for name in ("rows", "code_rows")),
        *((name, ctypes.c_int) for name in ("columns", "num_experts", "group_rows", "lead")),
    )


class WgradArguments(ctypes.Structure):
    """In wgrad.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("grad", "x", "offsets", "out")),
        *((name, ctypes.c_int) for name in ("rows", "first_expert", "num_experts", "n", "k")),
        *((name, ctypes.c_int) for name in ("wide_offsets", "accumulate", "narrow_out")),
    )


class TmaWgradArguments(ctypes.Structure):
    """In wgrad_wgmma.cu, aligned to the 64 bytes of its tensor maps."""

    _fields_ = (
        *((name, ctypes.c_byte * 128) for name in ("grad", "x")),
        ("of", WgradArguments),
        ("padding_", ctypes.c_byte * (-ctypes.sizeof(WgradArguments) % 64)),
    )


class ScaledWgradArguments(ctypes.Structure):
    """In wgrad_wgmma.cu, aligned to the 64 bytes of its tensor maps."""

    _fields_ = (
        *((name, ctypes.c_byte * 128) for name in ("grad", "x")),
        ("of", WgradArguments),
        *((name, ctypes.c_void_p) for name in ("grad_scale", "x_scale")),
        ("padding_", ctypes.c_byte * (-(ctypes.sizeof(WgradArguments) + 16) % 64)),
    )


class LinearArguments(ctypes.Structure):
    """In linear.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "offsets", "out")),
        *((name, ctypes.c_int) for name in ("rows", "first_expert", "num_experts", "n", "k")),
        *((name, ctypes.c_int) for name in ("wide_offsets", "zero_tail")),
        ("padding_", ctypes.c_byte * 4),
    )


class TmaLinearArguments(ctypes.Structure):
    """In linear_wgmma.cu, aligned to the 64 bytes of its tensor maps."""

    _fields_ = (
        *((name, ctypes.c_byte * 128) for name in ("weight", "x")),
        ("of", LinearArguments),
        ("padding_", ctypes.c_byte * (-ctypes.sizeof(LinearArguments) % 64)),
    )


class ScaledLinearArguments(ctypes.Structure):
    """In linear_wgmma.cu, aligned to the 64 bytes of its tensor maps."""

    _fields_ = (
        *((name, ctypes.c_byte * 128) for name in ("weight", "x")),
        ("of", LinearArguments),
        *((name, ctypes.c_void_p) for name in ("row_scale", "column_scale")),
        ("padding_", ctypes.c_byte * (-(ctypes.sizeof(LinearArguments) + 16) % 64)),
    )


class GatherLowRankArguments(ctypes.Structure):
    """In gather_low_rank.cu."""

    _fields_ = (
        ("of", LinearArguments),
        *((name, ctypes.c_void_p) for name in ("row_slot", "gathered")),
        ("top_k", ctypes.c_int),
        ("padding_", ctypes.c_byte * 4),
    )


class RankWgradArguments(ctypes.Structure):
    """In rank_wgrad.cu."""

    _fields_ = (
        ("of", WgradArguments),
        ("row_slot", ctypes.c_void_p),
        ("top_k", ctypes.c_int),
        ("padding_", ctypes.c_byte * 4),
    )


class LowRankLinearArguments(ctypes.Structure):
    """In linear_wgmma.cu, aligned to the 64 bytes of its tensor maps."""

    _fields_ = (
        *((name, ctypes.c_byte * 128) for name in ("weight", "x", "b", "inner")),
        ("of", LinearArguments),
        ("rank", ctypes.c_int),
        ("padding_", ctypes.c_byte * (-(ctypes.sizeof(LinearArguments) + 4) % 64)),
    )


class PackedLinearArguments(ctypes.Structure):
    """In packed_wgmma.cu, aligned to the 64 bytes of its tensor maps."""

    _fields_ = (
        *((name, ctypes.c_byte * 128) for name in ("x", "b", "inner")),
        ("of", LinearArguments),
        *((name, ctypes.c_void_p) for name in ("qdata", "scale", "global_scale")),
        ("rank", ctypes.c_int),
        ("padding_", ctypes.c_byte * (-(ctypes.sizeof(LinearArguments) + 28) % 64)),
    )
