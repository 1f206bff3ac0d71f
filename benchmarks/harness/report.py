"""Command-line arguments, aligned tables, JSON files and plots of the benchmarks.
Called by benchmarks/suites and harness/roofline.py; calls harness/shapes.py, timing.environment and matplotlib.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.harness.shapes import SHAPES, MoEShape, parse_shape
from benchmarks.harness.timing import Timing, describe, environment, machine_name

try:
    import matplotlib
except ImportError as error:
    raise ImportError("the benchmarks need matplotlib: pip install 'thunder_moe[bench]'") from error

matplotlib.use("Agg")
import matplotlib.pyplot as plt

__all__ = [
    "add_device",
    "aligned",
    "comma_list",
    "command_parser",
    "markdown",
    "parser",
    "plot",
    "plot_lines",
    "positive",
    "relative_error",
    "save",
    "stacked_bars",
    "table",
    "timed",
    "writable_file",
    "writable_folder",
]

# A timing whose quartiles differ by more than this share of its median is reported as noisy.
NOISY = 0.2
RESULTS = pathlib.Path(__file__).resolve().parents[1] / "results"


def parser(
    command: str, description: str, *, shapes: bool = True, limits: bool = True, slow: bool = True
) -> argparse.ArgumentParser:
    """Return the parser of a subcommand, with the arguments that all timed ones have.

    Args:
        command: the subcommand's name.
        description: the docstring of its module, whose "Called by" lines --help leaves out.
        shapes: whether it takes --shapes.
        limits: whether it takes --budget and, if `slow`, --slow.
        slow: whether a candidate can be too slow to be timed again.

    Returns:
        A parser with --device, --output, --rounds and these.
    """
    result = command_parser(command, description)
    add_device(result)
    if shapes:
        result.add_argument("--shapes", type=comma_list(_shape), help=f"comma-separated, of: {', '.join(SHAPES)}")
    result.add_argument(
        "--output",
        type=writable_folder,
        default=RESULTS,
        metavar="DIR",
        help="of JSON and plot (default: %(default)s)",
    )
    result.add_argument(
        "--rounds", type=positive, default=50, help="most timed calls of a candidate (default: %(default)s)"
    )
    if limits:
        result.add_argument(
            "--budget",
            type=_seconds,
            default=1.0,
            metavar="SECONDS",
            help="per candidate of a row (default: %(default)s)",
        )
    if limits and slow:
        result.add_argument(
            "--slow",
            type=_seconds,
            default=2.5,
            metavar="SECONDS",
            help="a candidate whose call takes longer is called once, and the table says so (default: %(default)s)",
        )
    return result


def add_device(result: argparse.ArgumentParser) -> None:
    """Add --device, by default the GPU if there is one."""
    default = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result.add_argument("--device", type=_device, default=default, help="cpu or cuda (default: %(default)s)")


def command_parser(command: str, description: str) -> argparse.ArgumentParser:
    """Return an empty parser of a subcommand; see `parser` for the arguments."""
    summary, _, rest = description.partition("\n")
    _, _, body = rest.partition("\n\n")
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks {command}",
        description=f"{summary}\n\n{body}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def comma_list(convert: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Return an argparse type: ``a,b,c`` with each part converted."""

    def parse(text: str) -> list[Any]:
        return [convert(part.strip()) for part in text.split(",")]

    return parse


def one_of(names: Iterable[str]) -> Callable[[str], str]:
    """Return an argparse type: one of some names."""
    known = tuple(names)

    def parse(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"got {text!r}, wanted one of {', '.join(known)}")
        return text

    return parse


def positive(text: str) -> int:
    """Parse an argparse argument: an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted an integer of at least 1")
    return int(text)


def writable_folder(text: str) -> pathlib.Path:
    """Parse an argparse argument: a folder that files can be written to; it may have to be made."""
    path = pathlib.Path(text)
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a folder; {there} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a folder that can be written; {there} cannot")
    return path


def writable_file(text: str) -> pathlib.Path:
    """Parse an argparse argument: a file that can be written, or made in a folder that is there."""
    path = pathlib.Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a file in a folder that is there")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a file that can be written")
    return path


def _shape(text: str) -> MoEShape:
    try:
        return parse_shape(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a number of seconds above 0")
    return value


def _device(text: str) -> torch.device:
    if text not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted cpu or cuda")
    if text == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("torch finds no CUDA device here")
    return torch.device(text)


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative Frobenius error; infinite when anything is not finite."""
    error = ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()
    return error if math.isfinite(error) else math.inf


def table(rows: Sequence[dict[str, Any]], keys: Sequence[str], baseline: str, *, of: str = "medians") -> str:
    """Aligned text: the keys of each row, milliseconds of each candidate, times faster than the baseline, % of floor.

    Args:
        rows: each has `keys`, and any of what `timed` gives and "floor_share".
        keys: the columns in front.
        baseline: the candidate that the others are compared with.
        of: what the numbers are, for the legend.
    """
    columns = [[key.replace("_", " "), *(str(row[key]) for row in rows)] for key in keys]
    columns += _columns(rows, "seconds", "{} [ms]", _milliseconds)
    columns += _columns(rows, "times_faster", "x {}", _number)
    columns += _columns(rows, "floor_share", "% of floor {}", lambda share: f"{100 * share:.1f}")
    legend = [f"{of}; x: times faster than {baseline}"]
    if any("floor_share" in row for row in rows):
        legend[0] += "; % of floor: the least time that the hardware allows packed weights, over the candidate's"
    timings = [timing for row in rows for timing in row.get("seconds", {}).values()]
    noisy = sum(t["quartiles"][1] - t["quartiles"][0] > NOISY * t["median"] for t in timings)
    if noisy:
        legend.append(
            f"NOISY: {noisy} of {len(timings)} timings have quartiles more than {NOISY:.0%} of the median apart; "
            "run again on an idle machine"
        )
    return "\n".join([aligned(list(zip(*columns, strict=True))), *legend])


def _columns(rows: Sequence[dict[str, Any]], key: str, header: str, text: Callable[[Any], str]) -> list[list[str]]:
    """Return a column for each candidate in row[key], "-" where a row lacks it."""
    names = dict.fromkeys(name for row in rows for name in row.get(key, ()))
    found = {name: [row.get(key, {}).get(name) for row in rows] for name in names}
    return [[header.format(name), *("-" if v is None else text(v) for v in values)] for name, values in found.items()]


def aligned(cells: Sequence[Sequence[str]]) -> str:
    """Return lines of right-aligned columns, the first line underlined."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def markdown(cells: Sequence[Sequence[str]]) -> str:
    """Return a table of Markdown, aligned; the first line is the header."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |" for row in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def _milliseconds(timing: dict[str, Any]) -> str:
    mark = {"one call": " (one call)", "cuda events": " (no graph)", "own": " (own graph)"}
    return _number(timing["median"] * 1e3) + next(
        (text for m, text in mark.items() if timing["method"].startswith(m)), ""
    )


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def timed(timings: dict[str, Timing], baseline: str) -> dict[str, Any]:
    """Return a row's "seconds" and "times_faster", from the result of `timing.measure`."""
    ratios = {name: timings[baseline].median / timing.median for name, timing in timings.items() if name != baseline}
    return {"seconds": {name: asdict(timing) for name, timing in timings.items()}, "times_faster": ratios}


def save(
    stem: str, device: torch.device, rows: list[dict[str, Any]], output: pathlib.Path, **more: Any
) -> pathlib.Path:
    """Writes ``<output>/<stem>_<machine_name>.json``: the environment, `more`, and the rows; prints the machine.

    Returns:
        The path of the file.
    """
    output.mkdir(parents=True, exist_ok=True)
    path = output / f"{stem}_{machine_name(device)}.json"
    print("measured on", describe(device))
    content = {"benchmark": stem, "environment": environment(device), **more, "rows": rows}
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def plot(
    path: pathlib.Path,
    rows: Sequence[dict[str, Any]],
    x: str,
    *,
    panel: Callable[[dict[str, Any]], str],
    label: Callable[[str, dict[str, Any]], str],
    baseline: str,
    title: str,
) -> pathlib.Path:
    """Draws times faster than the baseline against row[x], log-log, with a line at 1.

    Args:
        path: of the JSON; the PNG lies beside it.
        rows: as `table` takes them.
        x: the key of the horizontal axis.
        panel: the title of the panel that a row is in.
        label: candidate, row -> the label of its line in the panel.
        baseline: what the line at 1 is.
        title: of the figure.

    Returns:
        The path of the PNG.
    """
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        lines = panels.setdefault(panel(row), {})
        for name, ratio in row["times_faster"].items():
            lines.setdefault(label(name, row), []).append((row[x], ratio))
    path = path.with_suffix(".png")
    return plot_lines(path, panels, x=x, y=f"times faster than {baseline}", reference=1.0, title=title)


def plot_lines(
    path: pathlib.Path,
    panels: dict[str, dict[str, list[tuple[float, float]]]],
    *,
    x: str,
    y: str,
    reference: float | None,
    title: str,
    log: bool = True,
) -> pathlib.Path:
    """Draws panels of lines with a dashed one at the reference; a label has one colour in all, the legend is below.

    Args:
        path: of the PNG.
        panels: title -> label -> points.
        x: name of the horizontal axis, which is logarithmic.
        y: name of the vertical axis.
        reference: height of the dashed line, or None for none.
        title: of the figure.
        log: whether the vertical axis is logarithmic too, otherwise it starts at 0.

    Returns:
        The path of the PNG.
    """
    labels = dict.fromkeys(label for lines in panels.values() for label in lines)
    colors = {label: f"C{index}" for index, label in enumerate(labels)}
    columns = min(4, len(panels))
    lines_of_panels = -(-len(panels) // columns)
    legend_columns = max(1, min(2 * columns, int(70 * columns / max(map(len, labels), default=1) / 1.4)))
    size = (4.6 * columns, 3.8 * lines_of_panels + 0.2 * -(-len(labels) // legend_columns))
    figure, axes = plt.subplots(
        lines_of_panels, columns, figsize=size, squeeze=False, sharey=True, layout="constrained"
    )
    handles: dict[str, Any] = {}
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (name, lines) in zip(axes.flat, panels.items(), strict=False):
        for text, points in lines.items():
            x_y = zip(*sorted(points), strict=True)
            (handles[text],) = axis.plot(*x_y, marker="o", markersize=4, color=colors[text])
        ticks = sorted({point for points in lines.values() for point, _ in points})
        axis.set_xscale("log", base=2)
        if log:
            axis.set_yscale("log", base=2)
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        if reference is not None:
            axis.axhline(reference, color="black", linewidth=0.8, linestyle="--")
        axis.set(title=name, xlabel=x.replace("_", " "))
        axis.grid(alpha=0.3)
    for axis in axes[:, 0]:
        axis.set_ylabel(y)
    if not log:
        axes[0, 0].set_ylim(bottom=0)
    figure.suptitle(title)
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=legend_columns, fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def stacked_bars(
    path: pathlib.Path,
    panels: dict[str, dict[str, dict[str, float]]],
    *,
    axis_label: str,
    title: str,
) -> pathlib.Path:
    """Draws a panel of horizontal bars that are stacked from parts.

    Args:
        path: of the JSON; the PNG lies beside it.
        panels: title -> bar -> part -> length. Negative lengths are drawn as nothing.
        axis_label: of the lengths.
        title: of the figure.

    Returns:
        The path of the PNG.
    """
    bars = max(len(panel) for panel in panels.values())
    size = (8.5, 0.9 + len(panels) * (0.8 + 0.36 * bars))
    figure, axes = plt.subplots(len(panels), 1, figsize=size, squeeze=False, layout="constrained")
    for axis, (name, panel) in zip(axes.flat, panels.items(), strict=True):
        left = dict.fromkeys(panel, 0.0)
        for part in dict.fromkeys(part for lengths in panel.values() for part in lengths):
            lengths = {bar: max(0.0, panel[bar].get(part, 0.0)) for bar in panel}
            drawn = axis.barh(list(panel), list(lengths.values()), left=list(left.values()), label=part)
            left = {bar: left[bar] + lengths[bar] for bar in panel}
        axis.bar_label(drawn, [f"{_number(length)}" for length in left.values()], padding=3, fontsize="small")
        axis.margins(x=0.12)
        axis.invert_yaxis()
        axis.set(title=name, xlabel=axis_label)
        axis.grid(axis="x", alpha=0.3)
        axis.legend(fontsize="small")
    figure.suptitle(title)
    path = path.with_suffix(".png")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
