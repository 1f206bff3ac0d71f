"""Reports of the model suite: tables, kernels of profiles, plot, and several reports merged into one.
Called by suites/model.py; calls harness/{report,column}.py.

A report is the content of the suite's JSON: "environment", "read_bytes_per_second" and the options of the run, and
"rows", one for each column of a model with an attention. A merged one has "runs" too, the reports that it is made of,
without their rows; the "run" of a row is the index of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness.column import COLUMNS
from benchmarks.harness.report import markdown, plot_lines

__all__ = ["FULL", "legend", "merged", "peak_bytes", "plot", "profiles", "tables"]

FULL = "out of memory"
# A cell whose quartiles are further apart than this share of its median was disturbed: the tables show the quartiles.
DISTURBED = 0.05
# What the times of a line are compared with.
BASELINE, EAGER = "compiled bf16", "eager bf16"
Row = dict[str, Any]
# Of a table: the name of the line, and what it says of a row, or None where that was not measured.
Line = tuple[str, Callable[[Row], str | None]]


def merged(paths: Sequence[Path]) -> dict[str, Any]:
    """Return one report of several, for example of models that were measured on several GPUs.

    Args:
        paths: of JSON files of the suite.

    Returns:
        The report. Rows of the same column, model, layers and attention are one, whose cells come from all.

    Raises:
        ValueError: a file is not a report of the suite, or a cell was measured in two of them.
    """
    runs: list[dict[str, Any]] = []
    rows: dict[tuple[Any, ...], Row] = {}
    for path in paths:
        report = json.loads(path.read_text())
        if not isinstance(report, dict) or report.get("benchmark") != "model":
            raise ValueError(f"{path}: wanted a report of `python -m benchmarks model`")
        found = report.pop("rows")
        of_runs = report.get("runs") or [report]
        for row in found:
            row["run"] = row.get("run", 0) + len(runs)
            key = tuple(row.get(name) for name in ("model", "layers", "attention", "column"))
            _add(rows.setdefault(key, {}), row, path)
        runs += of_runs
    first = {key: value for key, value in runs[0].items() if key != "runs"}
    return {**first, "runs": runs, "rows": list(rows.values())}


def _add(row: Row, other: Row, path: Path) -> None:
    """Adds the cells of another file's row."""
    for key, value in other.items():
        if key in ("decode", "prefill"):
            cells = row.setdefault(key, {})
            for name, cell in value.items():
                if name in cells and "median" in cells[name]:
                    raise ValueError(f"{path}: {row['model']}, {row['column']}, {key} {name} is in an earlier file too")
                cells[name] = cell
        else:
            row.setdefault(key, value)


def tables(rows: Sequence[Row]) -> Iterator[tuple[str, list[list[str]]]]:
    """Return a table for each model and attention: its title, and its lines with a column for each row."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in sorted(rows, key=lambda row: "layers" not in row):
        key = row["model"], row["attention"], row.get("layers")
        if "layers" not in row:  # its weights did not fit: it is in the table of those that did
            key = next((other for other in groups if other[:2] == key[:2]), key)
        groups.setdefault(key, []).append(row)
    for (model, attention, _), group in groups.items():
        group.sort(key=lambda row: list(COLUMNS).index(row["column"]))
        layers = next((f"{row['layers']} of {row['all_layers']}" for row in group if "layers" in row), "no")
        cells = [["", *(row["column"] for row in group)]]
        for name, text in _lines(group):
            found = [text(row) for row in group]
            if any(cell is not None for cell in found):
                cells.append([name, *("-" if cell is None else cell for cell in found)])
        yield f"{model}, {layers} layers, attention {attention}", cells


def legend(rows: Iterable[Row]) -> str:
    """Say how far the quartiles of the cells are apart."""
    cells = [cell for row in rows for kind in ("decode", "prefill") for cell in row.get(kind, {}).values()]
    spreads = [_spread(cell) for cell in (*cells, *(row.get("generate", {}) for row in rows))]
    calm = [spread for spread in spreads if spread is not None and spread <= DISTURBED]
    disturbed = sum(spread is not None for spread in spreads) - len(calm)
    text = f"Medians. (x): times faster than {BASELINE}, for generate than {EAGER}. "
    text += f"Quartiles are at most {max(calm, default=0):.1%} of the median apart"
    return text + (f", but for {disturbed} DISTURBED cells, which show them." if disturbed else ".")


def _lines(rows: Sequence[Row]) -> Iterator[Line]:
    """Yield the lines of a table; ratios compare with another of its columns."""
    for batch in _keys(rows, "decode"):
        yield f"decode, batch {batch}: ms (% of floor)", partial(_decode, batch)
        yield f"batch {batch}: tokens/s (x)", partial(_rate, rows, batch)
    for tokens in _keys(rows, "prefill"):
        yield f"first token behind {tokens}: ms (x)", partial(_prefill, rows, tokens)
    yield "eager generate: tokens/s (x)", partial(_generate, rows)
    yield "weights: GB", lambda row: f"{row['model_bytes'] / 1e9:.1f}" if "model_bytes" in row else None
    yield "most memory: GB", lambda row: f"{most / 1e9:.1f}" if (most := peak_bytes(row)) else None
    yield "build + quantize: s", _load
    yield "first calls (compiling): s", _first_calls
    yield "error of the logits", lambda row: f"{row['relative_error']:.1g}" if "relative_error" in row else None
    yield "tokens apart", lambda row: f"{100 * row['tokens_apart']:.0f} %" if "tokens_apart" in row else None


def _keys(rows: Iterable[Row], kind: str) -> list[str]:
    return sorted({key for row in rows for key in row.get(kind, {})}, key=int)


def _decode(batch: str, row: Row) -> str:
    cell: dict[str, Any] = row.get("decode", {}).get(batch, {})
    if "median" not in cell:
        return _missing(row, cell)
    return _milliseconds(cell) + (f" ({100 * cell['floor_share']:.0f} %)" if "floor_share" in cell else "")


def _rate(rows: Iterable[Row], batch: str, row: Row) -> str:
    cell: dict[str, Any] = row.get("decode", {}).get(batch, {})
    if "median" not in cell:
        return _missing(row, cell)
    return f"{int(batch) / cell['median']:,.0f}" + _times(rows, row, "decode", batch)


def _prefill(rows: Iterable[Row], tokens: str, row: Row) -> str:
    cell: dict[str, Any] = row.get("prefill", {}).get(tokens, {})
    if "median" not in cell:
        return _missing(row, cell)
    return _milliseconds(cell) + _times(rows, row, "prefill", tokens)


def _missing(row: Row, cell: dict[str, Any]) -> str:
    """Say why a cell lacks a number."""
    error: str = cell.get("error") or row.get("error", "-")
    return error if error.startswith(FULL) else error.split(":")[0][:20]


def _spread(cell: dict[str, Any]) -> float | None:
    """Return the distance of a cell's quartiles as a share of its median."""
    if "quartiles" not in cell:
        return None
    median = cell["median"] if "median" in cell else cell["tokens_per_second"]
    return float((cell["quartiles"][1] - cell["quartiles"][0]) / median)


def _milliseconds(cell: dict[str, Any]) -> str:
    def text(seconds: float) -> str:
        return f"{seconds * 1e3:,.0f}" if seconds >= 0.1 else f"{seconds * 1e3:#.3g}"

    mark = " (no graph)" if "not captured" in cell["method"] else ""
    return text(cell["median"]) + mark + _quartiles(cell, text)


def _quartiles(cell: dict[str, Any], text: Callable[[float], str]) -> str:
    """Return the quartiles of a disturbed cell as text, else nothing."""
    return " [{}, {}]".format(*map(text, cell["quartiles"])) if (_spread(cell) or 0) > DISTURBED else ""


def _times(rows: Iterable[Row], row: Row, kind: str, key: str) -> str:
    """Say how many times faster a cell is than the baseline's."""
    other: dict[str, Any] = next((r.get(kind, {}).get(key, {}) for r in rows if r["column"] == BASELINE), {})
    if "median" not in other or row["column"] == BASELINE:
        return ""
    return f" ({other['median'] / row[kind][key]['median']:.2f})"


def _generate(rows: Iterable[Row], row: Row) -> str | None:
    cell: dict[str, Any] = row.get("generate", {})
    if "tokens_per_second" not in cell:
        return cell.get("error")
    own = cell["tokens_per_second"]
    other = next((r.get("generate", {}).get("tokens_per_second") for r in rows if r["column"] == EAGER), None)
    spread = _quartiles(cell, lambda rate: f"{rate:.1f}")
    return f"{own:.1f}" + spread + (f" ({own / other:.2f})" if other and row["column"] != EAGER else "")


def peak_bytes(row: Row) -> int | None:
    """Most bytes that a process of a column had allocated on its device, with weights that it shares.

    None if no cell knows.
    """
    cells = [row.get("load", {}), row.get("generate", {})]
    cells += [*row.get("decode", {}).values(), *row.get("prefill", {}).values()]
    return max((int(cell["peak_bytes"]) for cell in cells if "peak_bytes" in cell), default=None)


def _load(row: Row) -> str | None:
    return (
        "{build_seconds:.1f} + {quantize_seconds:.1f}".format(**row["load"]) if len(row.get("load", {})) > 1 else None
    )


def _first_calls(row: Row) -> str | None:
    cells = [*row.get("decode", {}).values(), *row.get("prefill", {}).values()]
    seconds = [cell["first_call_seconds"] for cell in cells if "first_call_seconds" in cell]
    return f"{sum(seconds):.0f}" if seconds else None


def profiles(rows: Iterable[Row]) -> Iterator[str]:
    """Return the kernels of decode steps and prefills."""
    for row in rows:
        for kind, of in (("decode", "batch"), ("prefill", "prompt of")):
            for key, cell in row.get(kind, {}).items():
                if "profile" not in cell:
                    continue
                total = sum(event["microseconds"] for event in cell["profile"])
                yield f"\n{row['model']}, {row['column']}, attention {row['attention']}, {of} {key}: {total:,.0f} us"
                lines = [
                    [f"{event['microseconds']:,.0f}", f"{100 * event['microseconds'] / total:.1f}", str(event["count"]),
                     event["kernel"][:100]]
                    for event in cell["profile"]
                ]  # fmt: skip
                yield markdown([["us", "%", "calls", "kernel"], *lines])


def plot(path: Path, rows: Iterable[Row]) -> Path | None:
    """Decode tokens per second by batch, a panel for each model and attention, beside the JSON."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        points = [(float(b), int(b) / cell["median"]) for b, cell in row.get("decode", {}).items() if "median" in cell]
        if points:
            layers = "" if row["layers"] == row["all_layers"] else f" {row['layers']} of {row['all_layers']} layers,"
            panels.setdefault(f"{row['model']},{layers} {row['attention']}", {})[row["column"]] = points
    if not panels:
        return None
    return plot_lines(
        path.with_suffix(".png"), panels, x="batch", y="decode [tokens/s]", reference=None,
        title="Whole models: tokens per second of decode steps",
    )  # fmt: skip
