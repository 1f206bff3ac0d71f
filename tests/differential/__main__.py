"""Thousands of random programs: ``python -m tests.differential --programs 3000 --compiler dynamo-aot --seed 0``.
Called by hand and by `make test-programs`; calls programs and execution. A failing program is shrunk and printed.
"""

from __future__ import annotations

import argparse
import gc
import signal
import sys
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from .execution import COMPILERS, check, script, shrink
from .programs import DISABLED, generate


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=1000, help="how many (default: %(default)s)")
    parser.add_argument("--compiler", choices=COMPILERS, default="dynamo-aot")
    parser.add_argument("--seed", type=int, default=0, help="of the first one; the others follow")
    parser.add_argument("--failures", type=int, default=10, help="stop after so many (default: %(default)s)")
    parser.add_argument("--no-shrink", action="store_true", help="print failing programs as they are")
    parser.add_argument("--out", type=Path, help="folder to write failing programs to")
    parser.add_argument("--without", default="", help="features to leave out, with commas between")
    parser.add_argument("--everything", action="store_true", help="features that are known to fail, too")
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    seeds = range(arguments.seed, arguments.seed + arguments.programs)
    _run(arguments, seeds, counts)
    print(f"{arguments.compiler}, seeds from {arguments.seed}:")
    for name, count in counts.items():
        print(f"{count:8d} {name}")
    return counts["failures"] > 0


def _run(arguments: argparse.Namespace, seeds: range, counts: Counter[str]) -> None:
    disabled = frozenset() if arguments.everything else frozenset(DISABLED[arguments.compiler])
    disabled |= set(filter(None, arguments.without.split(",")))
    ended = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(True))  # a run that is ended counts what it did
    for seed in tqdm(seeds, mininterval=5):
        if ended:
            break
        program = generate(seed, disabled)
        outcome = check(program, arguments.compiler)
        if (seed - seeds[0]) % 25 == 0:  # what is there by now (modules, torch's caches) stays: no collection walks it
            gc.collect()
            gc.freeze()
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
        smallest = program if arguments.no_shrink else shrink(program, arguments.compiler)
        print(script(smallest, arguments.compiler), flush=True)
        if arguments.out:
            arguments.out.mkdir(parents=True, exist_ok=True)
            text = "".join(f"# {line}\n" for line in outcome.failure.splitlines())
            path = arguments.out / f"{arguments.compiler}-{seed}.py"
            path.write_text(text + script(smallest, arguments.compiler))
        if counts["failures"] >= arguments.failures:
            break


if __name__ == "__main__":
    sys.exit(main())
