"""The benchmarks' command line: `python -m benchmarks COMMAND [--help]`, with a command of `COMMANDS`.
Called from the root of a checkout and by `make bench`; calls the chosen module of benchmarks/suites alone.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

# The module of benchmarks/suites -> the line that --help has on it.
COMMANDS = {
    "model": "whole Hugging Face models, eager and compiled, bf16 and NVFP4: the main benchmark",
    "generate": "generate() as a user calls it: eager, with a static cache, and fast_generate",
    "inference": "TTFT, TBOT and throughput of greedy decoding: Lightning Thunder's inference benchmark",
    "gemm": "one NVFP4 expert GEMM, every kernel backend, beside bf16 and the roofline",
    "layer": "a Llama4MoE layer: eager, Thunder and torch.compile, bf16 and NVFP4",
    "linear": "dense layers, torch's linear in bf16 and NVFP4 (on a GPU also their configurations)",
    "router": "routers: softmax, top-k and sort in torch's operations and as moe_router",
    "parallel": "a layer on several GPUs or processes: expert and tensor parallelism beside one",
    "sharded": "a 4-bit checkpoint by transformers' DistributedConfig: loads and decode steps beside one GPU",
    "training": "gradients of experts, biases and activations, expert blocks that train, beside torch's",
    "load": "loads of a 16-bit checkpoint into 4 bits: time and memory",
    "host": "what a call costs the host: operators beside torch's grouped GEMM, Hugging Face layers",
    "serving": "a routed MoE layer of vLLM: its kernels for NVFP4 experts beside ours (needs vLLM)",
    "engine": "vLLM's engine with its kernels for NVFP4 experts and with ours (a GPU, needs vLLM)",
    "adapters": "a routed MoE layer of vLLM with LoRA adapters on its experts, likewise",
    "compile": "a layer's call split into kernels and host overhead, eager and under torch.compile",
    "nvfuser": "a layer under Thunder with and without nvFuser (a GPU)",
    "tune": "measure the CUDA kernels' configurations and write configs.json (a GPU)",
    "roofline": "draw a file of other kernels' times as shares of the roofline",
}


def main(argv: Sequence[str] | None = None) -> Any:
    """Runs a suite.

    Args:
        argv: command-line arguments, those of the process when None.

    Returns:
        What the suite's `main` returns, mostly the rows of its JSON.

    Raises:
        SystemExit: bad arguments.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="The benchmarks of thunder_moe.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, line in COMMANDS.items():
        commands.add_parser(name, help=line, add_help=False)
    # Imports the chosen suite alone, which parses its own options: Thunder and transformers take seconds.
    command = parser.parse_args(arguments[:1]).command
    return importlib.import_module(f"benchmarks.suites.{command}").main(arguments[1:])


if __name__ == "__main__":
    main()
