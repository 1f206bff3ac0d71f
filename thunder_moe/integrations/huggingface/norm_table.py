"""The table of transformers' RMS norms that torch's rms_norm computes: what the forward of each class does.
Called by norms; calls known_code for the names of the classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from thunder_moe.integrations.huggingface.known_code import names


@dataclass(frozen=True)
class NormKind:
    """Describe the forward of a class: ``x * rsqrt(mean(x ** 2) + epsilon) * weight`` of x (..., H), in float32.

    Attributes:
        epsilon: the attribute that has it.
        rounds_first: the product with the weight is one of 16 bits, behind a rounding; else there is one rounding.
        since: the version of transformers from which on the classes compute this.
    """

    epsilon: str = "variance_epsilon"
    rounds_first: bool = True
    since: tuple[int, int] = (5, 7)


_KINDS: tuple[tuple[dict[str, Any], str], ...] = (
    (dict(rounds_first=False), """
        afmoe.AfmoeRMSNorm beam.BeamRMSNorm flex_olmo.FlexOlmoRMSNorm flint.FlintRMSNorm gpt_oss.GptOssRMSNorm
        helium.HeliumRMSNorm inkling2.Inkling2RMSNorm inkling2_loop.Inkling2LoopRMSNorm lara_mini.LaraMiniRMSNorm
        nemotron_h_omni.NemotronH_Omni_RMSNorm olmo2.Olmo2RMSNorm olmo3.Olmo3RMSNorm olmo_hybrid.OlmoHybridRMSNorm
        openai_privacy_filter.OpenAIPrivacyFilterRMSNorm
    """),
    (dict(rounds_first=False, since=(5, 19)), "nemotron_h.NemotronHRMSNorm"),
    (dict(rounds_first=False, since=(5, 23)), "deepseek_v4.DeepseekV4RMSNorm"),
    (dict(rounds_first=False, epsilon="eps"), """
        diffusion_gemma.DiffusionGemmaRMSNorm embedding_gemma2.EmbeddingGemma2RMSNorm gemma3n.Gemma3nRMSNorm
        gemma4.Gemma4RMSNorm gemma4_unified.Gemma4UnifiedRMSNorm kyutai_speech_to_text.KyutaiSpeechToTextRMSNorm
        moshi.MoshiRMSNorm muse_glimmer.MuseGlimmerRMSNorm muse_spark.MuseSparkRMSNorm neomme.NeoMMERMSNorm
    """),
    (dict(epsilon="eps"), "llama4.Llama4TextRMSNorm"),
    ({}, """
        aimv2.Aimv2RMSNorm apertus.ApertusRMSNorm apertus1p5.Apertus1p5TextRMSNorm arcee.ArceeRMSNorm
        aria.AriaTextRMSNorm axk1.AXK1RMSNorm axk2.AXK2RMSNorm bailing_hybrid.BailingHybridRMSNorm
        bamba.BambaRMSNorm bitnet.BitNetRMSNorm blt.BltRMSNorm chameleon.ChameleonRMSNorm clvp.ClvpRMSNorm
        cohere2_moe.Cohere2MoeRMSNorm cosmos3_edge.Cosmos3EdgeTextRMSNorm csm.CsmRMSNorm cwm.CwmRMSNorm
        deepseek_ocr2.DeepseekOcr2VisionRMSNorm deepseek_ocr2.DeepseekOcr2TextRMSNorm deepseek_v2.DeepseekV2RMSNorm
        deepseek_v3.DeepseekV3RMSNorm deepseek_v32.DeepseekV32RMSNorm deimv2.Deimv2RMSNorm dia.DiaRMSNorm
        diffllama.DiffLlamaRMSNorm doge.DogeRMSNorm dots1.Dots1RMSNorm dots3_note.Dots3NoteRMSNorm emu3.Emu3RMSNorm
        ernie4_5.Ernie4_5RMSNorm ernie4_5_moe.Ernie4_5_MoeRMSNorm ernie4_5_vl_moe.Ernie4_5_VLMoeRMSNorm
        eurobert.EuroBertRMSNorm evolla.EvollaRMSNorm exaone4.Exaone4RMSNorm exaone4_5.Exaone4_5_RMSNorm
        exaone_moe.ExaoneMoeRMSNorm falcon_h1.FalconH1RMSNorm falcon_mamba.FalconMambaRMSNorm glm.GlmRMSNorm
        glm4.Glm4RMSNorm glm4_moe.Glm4MoeRMSNorm glm4_moe_lite.Glm4MoeLiteRMSNorm glm4v.Glm4vRMSNorm
        glm4v_moe.Glm4vMoeTextRMSNorm glm4v_moe.Glm4vMoeRMSNorm glm5_next.Glm5NextTextRMSNorm
        glm5_next.Glm5NextRMSNorm glm_image.GlmImageRMSNorm glm_moe_dsa.GlmMoeDsaRMSNorm glm_ocr.GlmOcrRMSNorm
        granite.GraniteRMSNorm granite4_vision.Granite4VisionTextRMSNorm granite_docling.GraniteDoclingTextRMSNorm
        granite_swa.GraniteSWARMSNorm granitemoe.GraniteMoeRMSNorm granitemoe_swa.GraniteMoeSWARMSNorm
        granitemoehybrid.GraniteMoeHybridRMSNorm granitemoeshared.GraniteMoeSharedRMSNorm
        higgs_audio_v2.HiggsAudioV2RMSNorm hunyuan_v1_dense.HunYuanDenseV1RMSNorm hunyuan_v1_moe.HunYuanMoEV1RMSNorm
        hunyuan_vl.HunYuanVLRMSNorm hy_v3.HYV3RMSNorm hy_v4.HYV4RMSNorm hy_v4_vl.HYV4VLRMSNorm
        hyperclovax.HyperCLOVAXRMSNorm idefics.IdeficsRMSNorm idefics2.Idefics2RMSNorm idefics3.Idefics3RMSNorm
        inkling.InklingRMSNorm internvl.InternVLVisionRMSNorm jamba.JambaRMSNorm jetmoe.JetMoeRMSNorm
        kimi_linear.KimiLinearRMSNorm kolibri1.Kolibri1RMSNorm kosmos2_5.Kosmos2_5LayerNorm laguna.LagunaRMSNorm
        lfm2.Lfm2RMSNorm lfm2_moe.Lfm2MoeRMSNorm lfm3.Lfm3RMSNorm lfm3_vl.Lfm3VlVisionRMSNorm
        lighton_ocr.LightOnOcrRMSNorm llama.LlamaRMSNorm longcat_flash.LongcatFlashRMSNorm longt5.LongT5LayerNorm
        mamba.MambaRMSNorm mamba2.Mamba2RMSNorm mellum.MellumRMSNorm mimo_v2_flash.MiMoV2FlashRMSNorm
        minicpm3.MiniCPM3RMSNorm minimax.MiniMaxRMSNorm minimax_m2.MiniMaxM2RMSNorm ministral.MinistralRMSNorm
        ministral3.Ministral3RMSNorm mistral.MistralRMSNorm mistral3.Mistral3RMSNorm mistral4.Mistral4RMSNorm
        mistral_large4.MistralLarge4RMSNorm mixtral.MixtralRMSNorm mllama.MllamaTextRMSNorm molmo2.Molmo2RMSNorm
        mt5.MT5LayerNorm muse_glimmer_assistant.MuseGlimmerAssistantRMSNorm neucodec.NeuCodecRMSNorm
        olmoe.OlmoeRMSNorm ovis2.Ovis2RMSNorm paddleocr_vl.PaddleOCRRMSNorm pe_audio.PeAudioEncoderRMSNorm
        pe_audio_video.PeAudioVideoEncoderRMSNorm pe_video.PeVideoEncoderRMSNorm phi3.Phi3RMSNorm
        phi4_multimodal.Phi4MultimodalRMSNorm pix2struct.Pix2StructLayerNorm pixtral.PixtralRMSNorm
        pop2piano.Pop2PianoLayerNorm qianfan_ocr.QianfanOCRVisionRMSNorm qwen2.Qwen2RMSNorm
        qwen2_5_omni.Qwen2_5OmniRMSNorm qwen2_5_vl.Qwen2_5_VLRMSNorm qwen2_moe.Qwen2MoeRMSNorm
        qwen2_vl.Qwen2VLRMSNorm qwen3.Qwen3RMSNorm qwen3_moe.Qwen3MoeRMSNorm
        qwen3_omni_moe.Qwen3OmniMoeThinkerTextRMSNorm qwen3_omni_moe.Qwen3OmniMoeTextRMSNorm
        qwen3_omni_moe.Qwen3OmniMoeRMSNorm qwen3_omni_moe.Qwen3OmniMoeCode2WavRMSNorm qwen3_vl.Qwen3VLTextRMSNorm
        qwen3_vl_moe.Qwen3VLMoeTextRMSNorm sapiens2.Sapiens2RMSNorm seed_oss.SeedOssRMSNorm smollm3.SmolLM3RMSNorm
        solar_open.SolarOpenRMSNorm switch_transformers.SwitchTransformersLayerNorm t5.T5LayerNorm
        timesfm.TimesFmRMSNorm timesfm2_5.TimesFm2_5RMSNorm udop.UdopLayerNorm ultrabert.UltrabertRMSNorm
        ultravbert.UltraVBertRMSNorm umt5.UMT5LayerNorm unlimited_ocr.UnlimitedOcrTextRMSNorm
        vibevoice.VibeVoiceRMSNorm vibevoice_acoustic_tokenizer.VibeVoiceAcousticTokenizerRMSNorm
        vibevoice_asr.VibeVoiceAsrRMSNorm voxtral_realtime.VoxtralRealtimeRMSNorm xcodec2.Xcodec2RMSNorm
        youtu.YoutuRMSNorm zamba.ZambaRMSNorm zamba2.Zamba2RMSNorm zaya.ZayaRMSNorm
    """),
)  # fmt: skip
# Module and name of a class of transformers -> what it computes.
NORMS: dict[tuple[str, str], NormKind] = {name: NormKind(**options) for options, rows in _KINDS for name in names(rows)}
