"""Thousands of random programs: ``python -m tests.differential --programs 3000 --compiler dynamo-aot --seed 0``.
Called by hand and by `make test-programs`; calls programs and execution. A failing program is shrunk and printed.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import torch

from thunder_moe.progress import progress_bar

from .execution import COMPILERS, script, shrink
from .programs import DISABLED, generate
from .runtime import tensors_on
from .workers import outcomes


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=1000, help="how many (default: %(default)s)")
    parser.add_argument("--compiler", choices=COMPILERS, default="dynamo-aot")
    parser.add_argument("--seed", type=int, default=0, help="of the first one; the others follow")
    parser.add_argument("--device", default="cpu", help="of the tensors (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=1, help="processes that run them (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start none after so many (default: all)")
    parser.add_argument("--failures", type=int, default=10, help="stop after so many (default: %(default)s)")
    parser.add_argument("--no-shrink", action="store_true", help="print failing programs as they are")
    parser.add_argument("--out", type=Path, help="folder to write failing programs to")
    parser.add_argument("--without", default="", help="features to leave out, with commas between")
    parser.add_argument("--everything", action="store_true", help="features that are known to fail, too")
    arguments = parser.parse_args()
    disabled = set() if arguments.everything else set(DISABLED[arguments.compiler])
    disabled |= set(filter(None, arguments.without.split(",")))
    if torch.device(arguments.device).type != "cpu":
        disabled.add("numpy update")
    counts = _run(arguments, frozenset(disabled))
    print(f"{arguments.compiler}, {arguments.device}, torch {torch.__version__}, seeds from {arguments.seed}:")
    for name, count in counts.items():
        print(f"{count:8d} {name}")
    return counts["failures"] > 0


def _run(arguments: argparse.Namespace, disabled: frozenset[str]) -> Counter[str]:
    tensors_on(arguments.device)  # failing programs are shrunk here
    counts: Counter[str] = Counter()
    found = outcomes(
        range(arguments.seed, arguments.seed + arguments.programs),
        arguments.compiler,
        disabled,
        device=arguments.device,
        workers=arguments.workers,
        minutes=arguments.minutes,
    )
    for seed, outcome in progress_bar(found, total=arguments.programs, mininterval=5):
        counts["programs"] += 1
        counts["grouped GEMMs compiled"] += outcome.gemms
        counts["grouped GEMMs rewritten"] += outcome.rewritten
        counts["programs with a rewritten GEMM"] += outcome.rewritten > 0
        counts["eager execution raised"] += outcome.eager_raised
        counts["refused by an error that says what to do"] += outcome.refused
        counts["not a program"] += outcome.invalid
        counts["the compiler alone fails, too"] += outcome.stock_fails
        if outcome.failure is None:
            continue
        counts["failures"] += 1
        print(f"\n# seed {seed}, {arguments.compiler}: {outcome.failure}", flush=True)
        program = generate(seed, disabled)
        smallest = program if arguments.no_shrink else shrink(program, arguments.compiler)
        print(script(smallest, arguments.compiler, arguments.device), flush=True)
        if arguments.out:
            arguments.out.mkdir(parents=True, exist_ok=True)
            text = "".join(f"# {line}\n" for line in outcome.failure.splitlines())
            path = arguments.out / f"{arguments.compiler}-{seed}.py"
            path.write_text(text + script(smallest, arguments.compiler, arguments.device))
        if counts["failures"] >= arguments.failures:
            break
    return counts


if __name__ == "__main__":
    sys.exit(main())
