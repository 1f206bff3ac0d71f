"""Times vLLM's engine (`LLM.generate`, CUDA graphs): a Qwen3-30B-A3B with random NVFP4 experts, by each kernel.
Called by `python -m benchmarks engine`, which needs vLLM and a GPU; calls vLLM, each column in its own process.

A step of decoding is the time of 96 more tokens for each of a number of requests, over 96; prompts have 64 tokens.
Weights are random numbers, the same in all columns, made in the GPU's memory. Attention runs on vLLM's Triton kernels,
layers are not compiled, decoding is one CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.report import comma_list, one_of, parser, positive, save, table
from benchmarks.harness.served import COLUMNS

STEM = "engine"
OURS = "thunder_moe"
FEW, MANY = 4, 100  # generated tokens whose times are subtracted
CONFIG: dict[str, Any] = dict(
    architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", vocab_size=151936, hidden_size=2048,
    intermediate_size=6144, num_attention_heads=32, num_key_value_heads=4, head_dim=128, moe_intermediate_size=768,
    num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, max_position_embeddings=40960, rms_norm_eps=1e-6,
    tie_word_embeddings=False, dtype="bfloat16", hidden_act="silu", decoder_sparse_step=1, mlp_only_layers=[],
    rope_theta=1e6, attention_bias=False, bos_token_id=0, eos_token_id=1,
    quantization_config=dict(
        quant_method="modelopt", quant_algo="W4A16_NVFP4", group_size=16, kv_cache_quant_algo=None,
        ignore=["lm_head", "model.embed_tokens", "*self_attn*", "*.mlp.gate"],
    ),
)  # fmt: skip


def main(argv: Sequence[str]) -> list[dict[str, Any]]:
    """Runs the benchmark; prints the table and writes JSON.

    Args:
        argv: the arguments behind the subcommand.

    Returns:
        The rows of the JSON.

    Raises:
        SystemExit: bad arguments.
    """
    args = _arguments(argv)
    if args.column is not None:
        Path(args.into).write_text(json.dumps(_measure(args.column, args.layers, args.batches)))
        return []
    columns, notes = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for column in args.columns:
            into = Path(folder) / "result.json"
            command = [sys.executable, "-m", "benchmarks", "engine", "--column", column, "--into", str(into)]
            command += ["--layers", str(args.layers), "--batches", ",".join(map(str, args.batches))]
            switch = {"THUNDER_MOE_VLLM": "1" if column == OURS else "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            code = subprocess.run(command, env={**os.environ, **switch}, check=False).returncode
            if code == 0:
                columns[column] = json.loads(into.read_text())
                print(column, columns[column]["milliseconds"], flush=True)
            else:
                notes.append(f"{column}: ended with status {code}")
    first = columns.get(OURS)
    rows = []
    for batch in map(str, args.batches):
        own = {column: result["milliseconds"][batch] for column, result in columns.items()}
        row: dict[str, Any] = {"requests": int(batch), "milliseconds_per_step": own}
        if first is not None:
            row["times_faster"] = {f"{OURS} than {column}": own[column] / own[OURS] for column in own if column != OURS}
            row["equal_tokens"] = {
                column: _agreement(first["tokens"][batch], result["tokens"][batch])
                for column, result in columns.items()
                if column != OURS
            }
        rows.append(row)
    path = save(STEM, args.device, rows, args.output, layers=args.layers, notes=notes)
    print(table(rows, ("requests", "milliseconds_per_step", "equal_tokens"), ""), *notes, path, sep="\n")
    return rows


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    result = parser("engine", __doc__ or "", shapes=False)
    default = [column for column in COLUMNS if COLUMNS[column][1]]
    result.add_argument("--columns", type=comma_list(one_of(default)), default=default, help="default: %(default)s")
    result.add_argument("--batches", type=comma_list(positive), default=[1, 8, 32, 128], help="default: %(default)s")
    result.add_argument("--layers", type=positive, default=48, help="default: %(default)s")
    result.add_argument("--column", type=one_of(default), help=argparse.SUPPRESS)  # what a process of its own does
    result.add_argument("--into", help=argparse.SUPPRESS)
    return result.parse_args(argv)


def _measure(column: str, layers: int, batches: Sequence[int]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @register_model_loader("random_nvfp4")
    class Loader(DummyModelLoader):  # type: ignore[misc]
        def load_weights(self, model: Any, model_config: Any) -> None:
            for seed, (name, parameter) in enumerate(sorted(model.named_parameters())):
                _fill(name, parameter.data, torch.Generator(parameter.device).manual_seed(seed))

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
        llm = LLM(
            folder, skip_tokenizer_init=True, load_format="random_nvfp4", max_model_len=1024, seed=0,
            max_num_seqs=max(batches), max_num_batched_tokens=8192, gpu_memory_utilization=0.7,
            enable_prefix_caching=False, moe_backend=COLUMNS[column][0], attention_backend="TRITON_ATTN",
            compilation_config=dict(mode=0, cudagraph_mode="FULL", cudagraph_capture_sizes=list(batches)),
        )  # fmt: skip
        prompts = torch.randint(10, 150000, (max(batches), 64), generator=torch.Generator().manual_seed(0)).tolist()

        def seconds(requests: int, tokens: int) -> tuple[float, list[list[int]]]:
            parameters = SamplingParams(
                temperature=0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False
            )
            start = time.perf_counter()
            inputs = [{"prompt_token_ids": prompt} for prompt in prompts[:requests]]
            outputs = llm.generate(inputs, parameters, use_tqdm=False)
            return time.perf_counter() - start, [list(output.outputs[0].token_ids) for output in outputs]

        seconds(min(8, max(batches)), FEW)
        result: dict[str, Any] = {"milliseconds": {}, "tokens": {}}
        for batch in batches:
            few = min(seconds(batch, FEW)[0] for _ in range(3))
            runs = [seconds(batch, MANY) for _ in range(2)]
            result["milliseconds"][str(batch)] = (min(run[0] for run in runs) - few) / (MANY - FEW) * 1e3
            result["tokens"][str(batch)] = runs[0][1]
            print(column, batch, result["milliseconds"][str(batch)], "ms per step", flush=True)
    return result


def _fill(name: str, data: torch.Tensor, generator: torch.Generator) -> None:
    if data.dtype == torch.uint8:  # codes
        data.random_(0, 256, generator=generator)
    elif data.dtype == torch.float8_e4m3fn:
        scales = torch.empty(data.shape, dtype=torch.float16, device=data.device)
        data.copy_(scales.uniform_(0.5, 1.5, generator=generator))
    elif "weight_scale_2" in name:  # codes have a standard deviation of about 3
        data.fill_(1 / (3 * CONFIG["hidden_size" if "w13" in name else "moe_intermediate_size"] ** 0.5))
    elif "norm" in name or "input_scale" in name:
        data.fill_(1)
    else:
        data.copy_(torch.empty(data.shape, device=data.device).normal_(0, 0.02, generator=generator))


def _agreement(one: list[list[int]], other: list[list[int]]) -> float:
    """The share of tokens before the first difference of each request."""
    equal = 0
    for a, b in zip(one, other, strict=True):
        different = [at for at, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
        equal += different[0] if different else len(a)
    return equal / sum(map(len, one))
