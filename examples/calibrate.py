"""Quantizes a language model three ways and compares them with the 16-bit one: rounding, "mse" scales, calibration.
Called by users: `python examples/calibrate.py DIR`, on a model of small_moe.py or another one with held_out.txt; calls
transformers and thunder_moe.

The first half of held_out.txt calibrates (or another text), the second half measures. Writes DIR/calibrate.json.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from thunder_moe import calibrate_, quantize_
from thunder_moe.tools.divergence import divergence_table, measure_divergence


def main(argv: Sequence[str] | None = None) -> list[Any]:
    """Measures and writes; returns what `measure_divergence` found."""
    parser = argparse.ArgumentParser(
        description="Compare rounding, searched scales and calibration of a language model in NVFP4.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="a 16-bit model with tokenizer and held_out.txt")
    parser.add_argument("--text", type=Path, metavar="FILE", help="another text to calibrate on")
    parser.add_argument("--rows", type=int, default=256, help="of tokens to calibrate on, and to measure on")
    parser.add_argument("--context", type=int, default=128, help="tokens in a row")
    parser.add_argument("--linears", metavar="PATTERN", help="also these dense layers, such as '*_proj'")
    args = parser.parse_args(argv)
    for name in ("rows", "context"):
        if getattr(args, name) < 2:
            parser.error(f"--{name}: got {getattr(args, name)}, wanted at least 2")
    plain = AutoModelForCausalLM.from_pretrained(args.directory, dtype="auto")
    tokenizer: Any = AutoTokenizer.from_pretrained(args.directory)

    def tokens_of(path: Path) -> Tensor:
        return torch.tensor(tokenizer(path.read_text(encoding="utf-8"), verbose=False).input_ids)

    first, second = tokens_of(args.directory / "held_out.txt").chunk(2)
    texts = first if args.text is None else tokens_of(args.text), second
    sizes = [min(args.rows, len(text) // args.context) for text in texts]
    if min(sizes) < 2:
        parser.error(f"--context: got {args.context}, wanted two rows or more of each text: a longer one, or less")
    calibration, held_out = (
        text[: size * args.context].view(size, args.context) for text, size in zip(texts, sizes, strict=True)
    )
    linears = args.linears or False
    batches = calibration.split(8)
    ways: dict[str, Callable[[Any], Any]] = {
        "rounded": lambda model: quantize_(model, linears=linears),
        "mse": lambda model: quantize_(model, linears=linears, scale_search="mse"),
        "calibrated": lambda model: calibrate_(model, batches, linears=linears),
        "calibrated, mse": lambda model: calibrate_(model, batches, linears=linears, scale_search="mse"),
    }
    models, seconds = {}, {}
    for name, way in ways.items():
        models[name], start = copy.deepcopy(plain), time.process_time()
        said = way(models[name])
        seconds[name] = time.process_time() - start
    print(said)
    found = measure_divergence(plain, models, held_out, progress=True)
    print(divergence_table(found))
    print("CPU seconds: " + ", ".join(f"{name} {value:.1f}" for name, value in seconds.items()))
    content = {"rows": sizes, "context": args.context, "seconds": seconds, "models": [asdict(each) for each in found]}
    content["weights"] = asdict(said)["weights"]
    (args.directory / "calibrate.json").write_text(json.dumps(content, indent=1) + "\n")
    return found


if __name__ == "__main__":
    main()
