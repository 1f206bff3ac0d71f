"""`Engine`: vLLM's engine of a checkpoint, with given kernels for its 4-bit layers, in a process of its own.
Called by suites/engine.py; calls vLLM there, and nothing of it here.

Settings that all columns share: what `vllm serve` does by itself, that is its choice of attention kernels, layers
compiled by vLLM and CUDA graphs. The process imports vLLM while the checkpoint is written and waits for `Engine.start`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
import traceback
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from benchmarks.harness.served import COLUMNS

__all__ = ["ENGINES", "MODELS", "Engine"]

OURS = "thunder_moe"
FP8 = "vLLM FP8"
ENGINES = (*COLUMNS, FP8)
FEW = 4  # new tokens whose time is subtracted
REQUEST = 1024  # tokens of the longest prompt
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": dict(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_attention_heads=32, num_key_value_heads=4,
        head_dim=128, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
        max_position_embeddings=40960, rope_theta=1e6, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1,
    ),
    "tiny": dict(
        vocab_size=512, hidden_size=128, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
        max_position_embeddings=2048, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1,
    ),
}  # fmt: skip


class Engine:
    """Asks a process with an engine."""

    def __init__(self, column: str, path: Path, options: dict[str, Any]) -> None:
        """Starts the process.

        Args:
            column: of `ENGINES`.
            path: of the checkpoint, which need not be there yet.
            options: "device", "batches" (of decoding), "tokens" (of a step), "new" (that are timed), "compiled",
                "attention" (vLLM's name of its kernels, or None for its choice), "cores" (that the process runs on, or
                None for all), "gpu" (that it sees, or None for all).
        """
        self.column = column
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(column, path, options, other), daemon=True)
        switch = {"THUNDER_MOE_VLLM": "1" if column == OURS else "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        if options["gpu"] is not None:
            switch["CUDA_VISIBLE_DEVICES"] = str(options["gpu"])
        before = {name: os.environ.get(name) for name in switch}
        os.environ.update(switch)
        try:
            self._process.start()
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value
        other.close()

    def start(self) -> None:
        """Tells the process that the checkpoint is there."""
        self._pipe.send(("start", ()))

    def wait(self) -> None:
        """Until the engine is there.

        Raises:
            RuntimeError: it does not start; the first line of the reason.
        """
        self._answer()

    def ask(self, question: str, *arguments: Any) -> Any:
        """Return the result of the method of `_Column` that `question` names.

        Raises:
            RuntimeError: its error, in the engine's process.
        """
        self._pipe.send((question, arguments))
        return self._answer()

    def end(self) -> None:
        """Ends the process."""
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(10)
        if self._process.is_alive():
            self._process.kill()

    def _answer(self) -> Any:
        try:
            worked, result = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join(20)
            raise RuntimeError(f"the engine's process ended with {self._process.exitcode}") from None
        if not worked:
            raise RuntimeError(result)
        return result


def _serve(column: str, path: Path, options: dict[str, Any], pipe: Connection) -> None:
    """Runs in the process: makes the engine and answers questions."""
    try:
        if options["cores"] is not None:
            os.sched_setaffinity(0, options["cores"])
        if find_spec("flashinfer") is None:  # greedy tokens need no sampler of its
            os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        import vllm  # noqa: F401  (takes seconds)

        pipe.recv()
        own = _Column(column, path, options)
        pipe.send((True, None))
        while True:
            question, arguments = pipe.recv()
            pipe.send((True, getattr(own, question)(*arguments)))
    except EOFError:
        return
    except BaseException as error:
        traceback.print_exc()
        pipe.send((False, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"))


class _Column:
    def __init__(self, column: str, path: Path, options: dict[str, Any]) -> None:
        from vllm import LLM

        backend, quantized = COLUMNS.get(column, ("auto", False))
        settings: dict[str, Any] = {} if quantized else dict(load_format=_loader(path))
        if column == FP8:
            settings.update(quantization="fp8")
        if options["device"] == "cuda":
            graphs: dict[str, Any] = dict(cudagraph_capture_sizes=sorted(set(options["batches"])))
            if not options["compiled"]:
                graphs.update(mode=0, cudagraph_mode="FULL_DECODE_ONLY")
            settings.update(attention_backend=options["attention"], compilation_config=graphs)
        else:
            settings.update(enforce_eager=True)
        self.new: int = options["new"]
        self.generator = torch.Generator().manual_seed(1)
        self.vocabulary = json.loads((path / "config.json").read_text())["vocab_size"]
        self.llm = LLM(
            str(path if quantized else path.with_name("bf16")), skip_tokenizer_init=True, seed=0, dtype="bfloat16",
            max_model_len=REQUEST + max(FEW, self.new) + 64, max_num_seqs=max(*options["batches"], 64),
            max_num_batched_tokens=max(options["tokens"], 2048), enable_prefix_caching=False, moe_backend=backend,
            linear_backend=backend,
            gpu_memory_utilization=0.2, kv_cache_memory_bytes=2 << 30, **settings,
        )  # fmt: skip

    def generate(self, prompts: list[list[int]], new: int) -> tuple[list[list[int]], list[list[float]]]:
        """Greedy tokens of each prompt, and their log probabilities."""
        out = self._run(prompts, new, logprobs=0)
        tokens = [list(request.outputs[0].token_ids) for request in out]
        values = [
            [position[token].logprob for token, position in zip(own, request.outputs[0].logprobs, strict=True)]
            for own, request in zip(tokens, out, strict=True)
        ]
        return tokens, values

    def attention(self) -> list[str]:
        """Return the names of vLLM's attention kernels that the model runs."""
        (names,) = self.llm.apply_model(_attention)
        return sorted(names)

    def version(self) -> str:
        """Return vLLM's version."""
        import vllm

        return str(vllm.__version__)

    def decode(self, requests: int) -> float:
        """Return the seconds of a step of decoding for a number of requests, whose prompts have 64 tokens."""
        seconds = []
        for count in (FEW, FEW + self.new):
            prompts = self._random(requests, 64)
            seconds.append(self._seconds(partial(self._run, prompts, count)))
        return (seconds[1] - seconds[0]) / self.new

    def prefill(self, tokens: int) -> float:
        """Return the seconds of one new token for each of as many prompts as give a number of tokens."""
        size = min(tokens, REQUEST)
        prompts = self._random(tokens // size, size)
        return self._seconds(partial(self._run, prompts, 1))

    def _random(self, requests: int, tokens: int) -> list[list[int]]:
        ids: list[list[int]] = torch.randint(10, self.vocabulary, (requests, tokens), generator=self.generator).tolist()
        return ids

    def _seconds(self, run: Callable[[], Any]) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def _run(self, prompts: list[list[int]], new: int, **more: Any) -> Any:
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False, **more
        )
        return self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], parameters, use_tqdm=False)


def _attention(model: Any) -> set[str]:
    return {module.attn_backend.get_name() for module in model.modules() if hasattr(module, "attn_backend")}


def _loader(path: Path) -> str:
    """Registers a loader that dequantizes a checkpoint, and writes beside it the settings of a 16-bit one."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    config = json.loads((path / "config.json").read_text())
    config.pop("quantization_config")
    plain = path.with_name("bf16")
    plain.mkdir(exist_ok=True)
    (plain / "config.json").write_text(json.dumps(config))

    @register_model_loader("dequantized")
    class Loader(DefaultModelLoader):  # type: ignore[misc]
        def __init__(self, load_config: Any) -> None:
            super().__init__(dataclasses.replace(load_config, load_format="safetensors"))

        def load_weights(self, model: Any, model_config: Any) -> None:
            model.load_weights(_dequantized(path))

    return "dequantized"


def _dequantized(path: Path) -> Any:
    """Return names and 16-bit tensors of a checkpoint of save_checkpoint."""
    from safetensors import safe_open

    from thunder_moe.formats.mxfp8 import MXFP8Weight
    from thunder_moe.formats.nvfp4 import NVFP4Weight
    from thunder_moe.formats.registry import dequantize
    from thunder_moe.formats.weight import PackedWeight

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt", device=device) as tensors:
            names = set(tensors.keys())
            for name in sorted(names):
                if name.endswith(("_scale", "_scale_2")):
                    continue
                tensor = tensors.get_tensor(name)
                if f"{name}_scale" in names:
                    scale = tensors.get_tensor(f"{name}_scale")[None]
                    weight: PackedWeight
                    if f"{name}_scale_2" in names:
                        scale_2 = tensors.get_tensor(f"{name}_scale_2").reshape(1)
                        weight = NVFP4Weight(tensor[None], scale, scale_2)
                    else:
                        weight = MXFP8Weight(tensor[None], scale.view(torch.float8_e8m0fnu))
                    tensor = dequantize(weight, torch.bfloat16)[0]
                yield name, tensor
