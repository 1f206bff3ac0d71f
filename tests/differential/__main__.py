"""Thousands of random programs: ``python -m tests.differential --programs 3000 --compiler dynamo-aot --seed 0``.
Called by hand and by `make test-programs`; calls workers. A failing program is shrunk and printed; with
``--programs 1 --seed N`` it runs alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from thunder_moe.progress import progress_bar

from .execution import COMPILERS
from .programs import DISABLED
from .workers import Finished, Settings, outcomes


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=1000, help="how many (default: %(default)s)")
    parser.add_argument("--compiler", choices=COMPILERS, default="dynamo-aot")
    parser.add_argument("--seed", type=int, default=0, help="of the first one; the others follow")
    parser.add_argument("--device", default="cpu", help="of the tensors (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=1, help="processes that run them (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start none after so many (default: all)")
    parser.add_argument("--limit", type=float, default=120, help="seconds of a program: a longer one hangs")
    parser.add_argument(
        "--shrink", type=float, default=60, help="seconds to shrink a failing program; 0: print it whole"
    )
    parser.add_argument("--failures", type=int, default=100, help="stop after so many (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="folder to write failing programs to")
    parser.add_argument("--output", type=Path, help="JSON file to write the summary and the failures to")
    parser.add_argument("--without", default="", help="features to leave out, with commas between")
    parser.add_argument("--everything", action="store_true", help="features that are known to fail, too")
    arguments = parser.parse_args()
    disabled = set() if arguments.everything else set(DISABLED[arguments.compiler])
    disabled |= set(filter(None, arguments.without.split(",")))
    if torch.device(arguments.device).type != "cpu":
        disabled.add("numpy update")
    settings = Settings(
        arguments.compiler, frozenset(disabled), arguments.device, arguments.limit, shrinking=arguments.shrink
    )
    summary = Summary(arguments)
    seeds = range(arguments.seed, arguments.seed + arguments.programs)
    found = outcomes(seeds, settings, workers=arguments.workers, seconds=arguments.seconds)
    try:
        for finished in progress_bar(found, total=arguments.programs, mininterval=5):
            summary.add(finished)
            if len(summary.failures) >= arguments.failures:
                break
    finally:
        found.close()
        summary.write()
    return len(summary.failures) > 0


class Summary:
    """Counts of what came of the programs; prints failures as they come."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._start = time.monotonic()
        self._ended: set[int] = set()
        self.counts: Counter[str] = Counter(dict.fromkeys(("programs", "failures"), 0))
        self.gemms: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.stock_fails: Counter[str] = Counter()
        self.features: Counter[str] = Counter()
        self.examples: dict[str, int] = {}
        self.cpu_seconds = 0.0
        self.slowest: tuple[float, int] = (0.0, 0)
        self.failures: list[dict[str, Any]] = []

    def add(self, finished: Finished) -> None:
        outcome, counts = finished.outcome, self.counts
        self._ended.add(finished.seed)
        counts["programs"] += 1
        counts["programs with a rewritten GEMM"] += outcome.rewritten > 0
        counts["eager execution raised"] += outcome.eager_raised
        counts["refused by an error that says what to do"] += outcome.refused is not None
        counts["not a program"] += outcome.invalid
        counts["the compiler alone fails, too"] += outcome.stock_fails is not None
        counts["failures"] += outcome.failure is not None
        self.gemms.update(outcome.gemms)
        self.refused.update(filter(None, [outcome.refused]))
        self.stock_fails.update(filter(None, [outcome.stock_fails]))
        self.features.update(finished.features)
        for reason in filter(None, (outcome.refused, outcome.stock_fails)):
            self.examples.setdefault(reason, finished.seed)
        self.cpu_seconds += finished.seconds
        self.slowest = max(self.slowest, (finished.seconds, finished.seed))
        if outcome.failure is None:
            return
        compiler, head = self._arguments.compiler, "".join(f"# {line}\n" for line in outcome.failure.splitlines())
        self.failures.append(dict(seed=finished.seed, failure=outcome.failure, script=finished.script))
        print(f"\n# seed {finished.seed}, {compiler}: {outcome.failure}\n{finished.script}", flush=True)
        if self._arguments.out:
            self._arguments.out.mkdir(parents=True, exist_ok=True)
            (self._arguments.out / f"{compiler}-{finished.seed}.py").write_text(head + finished.script)

    def write(self) -> None:
        """Prints the counts, and writes them with the failures to the JSON file."""
        arguments, seconds = self._arguments, time.monotonic() - self._start
        first, after = arguments.seed, max(self._ended, default=arguments.seed - 1) + 1
        document = dict(
            compiler=arguments.compiler,
            device=arguments.device,
            torch=torch.__version__,
            seeds=[first, after],
            missing=sorted(set(range(first, after)) - self._ended),
            seconds=round(seconds, 1),
            workers=arguments.workers,
            cpu_seconds=round(self.cpu_seconds, 1),
            slowest=dict(cpu_seconds=round(self.slowest[0], 1), seed=self.slowest[1]),
            counts=dict(self.counts),
            gemms=dict(self.gemms.most_common()),
            refused=dict(self.refused.most_common()),
            stock_fails=dict(self.stock_fails.most_common()),
            examples=self.examples,
            features=dict(self.features.most_common()),
            failures=self.failures,
        )
        if arguments.output:
            arguments.output.write_text(json.dumps(document, indent=1) + "\n")
        print(f"\n{arguments.compiler}, {arguments.device}, torch {torch.__version__}, seeds {first} to {after - 1}:")
        for title, table in (
            (f"in {seconds:.0f} s, {self.cpu_seconds / max(len(self._ended), 1):.2f} CPU s each", self.counts),
            ("grouped GEMMs by decision", self.gemms),
            ("refused", self.refused),
            ("the compiler alone fails", self.stock_fails),
        ):
            print(f"{title}:" if table else f"{title}: none")
            for name, count in table.items() if table is self.counts else table.most_common():
                print(f"{count:8d} {name}")
        for failure in self.failures:
            print(f"failed: seed {failure['seed']}: {failure['failure'].splitlines()[0][:160]}")
        if document["missing"]:
            print(f"not finished: seeds {document['missing']}")
        print(f"go on with --seed {after}")


if __name__ == "__main__":
    sys.exit(main())
