"""Draws a file of other kernels' times: each kernel's share of the least time that the hardware allows.
Called by `python -m benchmarks roofline FILE`; calls harness/{roofline,report}.py.

FILE is a JSON list of rows with "shape", "gemm" (gate_up or down), "tokens", and in microseconds "floor" (the least
time) and any of "bf16", "marlin", "ogs", "humming", "ours". The plot is written beside it.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.report import command_parser, table
from benchmarks.harness.roofline import missing, panels, plot_shares, read_peers, summary


def main(argv: Sequence[str]) -> list[dict[str, Any]]:
    """Prints the geometric means of a peers' file and draws its shares of the floor.

    Args:
        argv: the arguments behind the subcommand.

    Returns:
        The means, see `roofline.summary`.

    Raises:
        SystemExit: bad arguments.
    """
    result = command_parser("roofline", __doc__ or "")
    result.add_argument("file", type=pathlib.Path, help="JSON rows of other kernels, in microseconds")
    path = result.parse_args(argv).file
    try:
        peers = read_peers(str(path))
    except argparse.ArgumentTypeError as error:
        result.error(str(error))
    means = summary(peers, "tokens")
    title = "One expert GEMM with 4-bit weights: how close kernels come to what the hardware allows"
    image = plot_shares(path.with_suffix(".png"), panels(peers, "tokens"), "tokens", title)
    print(table(means, ("gemm", "tokens"), "bf16", of="geometric means over the shapes"), *missing(peers), sep="\n")
    print(image)
    return means
