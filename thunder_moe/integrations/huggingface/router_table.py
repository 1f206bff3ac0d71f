"""The table of transformers' routers that `moe_router` computes: what the forward of each class does.
Called by routers; calls routing for the form of the operator, known_code for the names of the classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from thunder_moe.integrations.huggingface.known_code import names
from thunder_moe.routing import RouterConfig


@dataclass(frozen=True)
class RouterKind:
    """Describe what the forward of a class computes of hidden states (T, H): logits, scores and ids."""

    score: str = "softmax"  # as in `RouterConfig`
    normalize: bool | str = True  # as in `RouterConfig`, or the attribute of the router that says so
    epsilon: float = 0.0  # as in `RouterConfig`, where it normalizes
    least_sum: str | None = None  # the router's attribute for it, if any
    scale: str | None = None  # the router's attribute for it, if any
    group_best: int = 0  # like in `RouterConfig`, where the best `topk_group` of `num_group` groups count; 0: no groups
    mask_to_zero: bool = False  # as in `RouterConfig`
    grouped_if: tuple[str, Any] | None = None  # (attribute, its value for routers with groups); None: all have groups
    requires: tuple[str, Any] | None = None  # (attribute, its value for routers that compute this); None: all do
    wide: bool = False  # the linear layer runs in float32
    logits_float: bool = False  # the logits are float32 behind a linear layer in the dtype of the hidden states
    scores_float: bool = False  # the scores are float32, else in the dtype of the hidden states
    # Path of the correction bias in the module; "" where it is the second argument; None without one
    bias: str | None = None
    flattens: bool = True  # takes hidden states of more than two dimensions, too
    since: tuple[int, int] = (5, 7)  # the version of transformers from which on the classes compute this

    def form(self, router: Any) -> RouterConfig | None:
        """Return the form of a router, by its attributes; None where these say that it computes something else."""
        if self.requires is not None and getattr(router, self.requires[0]) != self.requires[1]:
            return None
        options: dict[str, Any] = {}
        normalize = getattr(router, self.normalize) if isinstance(self.normalize, str) else self.normalize
        if normalize:
            options["epsilon"] = self.epsilon
            options["least_sum"] = 0.0 if self.least_sum is None else float(getattr(router, self.least_sum))
        if self.scale is not None:
            options["scale"] = float(getattr(router, self.scale))
        grouped = self.grouped_if is None or getattr(router, self.grouped_if[0]) == self.grouped_if[1]
        if self.group_best and grouped and (router.num_group or 1) > router.topk_group:
            options |= dict(num_groups=router.num_group, top_groups=router.topk_group)
            options |= dict(group_best=self.group_best, mask_to_zero=self.mask_to_zero)
        return RouterConfig(router.top_k, self.score, bool(normalize), **options)


_DEEPSEEK_V3: dict[str, Any] = dict(
    score="sigmoid", normalize="norm_topk_prob", epsilon=1e-20, scale="routed_scaling_factor", group_best=2,
    bias="e_score_correction_bias", wide=True, scores_float=True, since=(5, 15),
)  # fmt: skip
_SIGMOID: dict[str, Any] = dict(score="sigmoid", scores_float=True)
_KINDS: tuple[tuple[dict[str, Any], str], ...] = (
    (dict(normalize="norm_topk_prob"), """
        flex_olmo.FlexOlmoTopKRouter mellum.MellumTopKRouter olmoe.OlmoeTopKRouter qwen2_moe.Qwen2MoeTopKRouter
        qwen3_moe.Qwen3MoeTopKRouter qwen3_next.Qwen3NextTopKRouter qwen3_omni_moe.Qwen3OmniMoeTalkerTextTopKRouter
        qwen3_omni_moe.Qwen3OmniMoeThinkerTextTopKRouter qwen4_exp.Qwen4ExpTextTopKRouter
    """),
    ({}, """
        qwen3_5_moe.Qwen3_5MoeTopKRouter qwen3_omni_moe.Qwen3OmniMoeTextTopKRouter
        qwen3_vl_moe.Qwen3VLMoeTextTopKRouter
    """),
    (dict(normalize="norm_topk_prob", wide=True), "lara_mini.LaraMiniTopKRouter"),
    (dict(scores_float=True), "minimax.MiniMaxTopKRouter mixtral.MixtralTopKRouter"),
    (dict(flattens=False), "gpt_oss.GptOssTopKRouter"),
    (dict(flattens=False, since=(5, 23)), "aria.AriaTextTopKRouter"),
    (dict(flattens=False, requires=("expert_selection_fn", "softmax")), "cohere2_moe.Cohere2MoeTopKRouter"),
    (dict(flattens=False, normalize=False), "jamba.JambaTopKRouter"),
    (dict(flattens=False, logits_float=True, since=(5, 23)), """
        granitemoe.GraniteMoeTopKRouter granitemoe_swa.GraniteMoeSWATopKRouter
        granitemoehybrid.GraniteMoeHybridTopKRouter granitemoeshared.GraniteMoeSharedTopKRouter
    """),
    (dict(flattens=False, wide=True, least_sum="norm_min", bias="moe_statics.e_score_correction_bias", since=(5, 15)),
     "ernie4_5_moe.Ernie4_5_MoeTopKRouter ernie4_5_vl_moe.Ernie4_5_VLMoeMoeTopKRouter"),
    (dict(normalize=False, scale="routed_scaling_factor", group_best=1, wide=True, scores_float=True,
          grouped_if=("topk_method", "group_limited_greedy")), """
        deepseek_ocr2.DeepseekOcr2TextTopkRouter deepseek_v2.DeepseekV2TopkRouter
        unlimited_ocr.UnlimitedOcrTextTopkRouter
    """),
    (dict(scale="routed_scaling_factor", group_best=2, wide=True, scores_float=True),
     "mistral_large4.MistralLarge4TextTopkRouter"),
    (_DEEPSEEK_V3, """
        axk1.AXK1TopkRouter bailing_hybrid.BailingHybridTopkRouter deepseek_v3.DeepseekV3TopkRouter
        deepseek_v32.DeepseekV32TopkRouter dots1.Dots1TopkRouter dots3_note.Dots3NoteTextTopkRouter
        exaone_moe.ExaoneMoeTopkRouter glm4_moe.Glm4MoeTopkRouter glm4_moe_lite.Glm4MoeLiteTopkRouter
        glm4v_moe.Glm4vMoeTextTopkRouter glm5_next.Glm5NextTextTopkRouter glm_moe_dsa.GlmMoeDsaTopkRouter
        hy_v4.HYV4TopkRouter hy_v4_vl.HYV4VLTopkRouter kimi_linear.KimiLinearTopkRouter
        mimo_v2_flash.MiMoV2FlashTopkRouter nemotron_h.NemotronHTopkRouter solar_open.SolarOpenTopkRouter
    """),
    (_DEEPSEEK_V3 | dict(mask_to_zero=True), "axk2.AXK2TopkRouter"),
    (_DEEPSEEK_V3 | dict(scale=None), "beam.BeamTopKRouter"),
    (_SIGMOID | dict(epsilon=1e-20, scale="router_scaling_factor", wide=True, bias=""),
     "dots3_note.Dots3NoteVisionTopKRouter hy_v3.HYV3TopKRouter"),
    (_SIGMOID | dict(bias=""), "minimax_m2.MiniMaxM2TopKRouter"),
    (_SIGMOID | dict(bias="e_score_correction_bias"), "minimax_m3_vl.MiniMaxM3VLTopKRouter step3p7.Step3p7TopKRouter"),
    (_SIGMOID | dict(normalize="norm_topk_prob", wide=True), "flint.FlintTopKRouter"),
    (dict(score="sigmoid", logits_float=True, bias="e_score_correction_bias",
          requires=("router_logit_softcapping", 0.0)), "laguna.LagunaTopKRouter"),
)  # fmt: skip
# Module and name of a class of transformers -> what it computes.
ROUTERS: dict[tuple[str, str], RouterKind] = {
    name: RouterKind(**options) for options, rows in _KINDS for name in names(rows)
}
