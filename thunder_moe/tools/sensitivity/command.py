"""``python -m thunder_moe sensitivity``: measures a model, or reads a measurement, chooses formats, writes and plots.
Called by the command line; calls measure, budget, formats_file, report, and integrations.huggingface.text to load.
"""

from __future__ import annotations

import argparse
import os
from math import isfinite
from pathlib import Path

from thunder_moe.checkpoint.files import expand_user
from thunder_moe.tools.sensitivity.budget import Choice, choose_formats
from thunder_moe.tools.sensitivity.formats_file import read_sensitivity, write
from thunder_moe.tools.sensitivity.measure import WIDE, measure_choice, measure_sensitivity
from thunder_moe.tools.sensitivity.report import plot, require_matplotlib, table


def run(options: argparse.Namespace) -> str:
    """Runs the command with its parsed arguments; returns the table, the choice and the files, to be printed.

    Raises:
        ValueError: an argument, named with its value, or as `measure_sensitivity` and `choose_formats`.
        OSError: no model or text, or the output cannot be written.
        ImportError: transformers or matplotlib is missing.
    """
    if options.budget is not None and not (isfinite(options.budget) and options.budget > 0):
        raise ValueError(f"--budget: got {options.budget}, wanted gigabytes above 0")
    files = _output_files(expand_user(options.output, "--output"))
    if not options.no_plot:
        require_matplotlib()
    if options.model.endswith(".json"):
        model, windows = None, None
        if options.data is not None:
            raise ValueError(f"--data: got {options.data!r} with a measurement as MODEL, wanted a model, or no --data")
        for name, patterns in (("--filter", options.filter), ("--ignore", options.ignore)):
            if patterns is not None:
                raise ValueError(f"{name}: got {patterns} with a measurement as MODEL, wanted a model to measure")
        found, about = read_sensitivity(options.model)
        about = {name: about[name] for name in ("model", "data", "context", "dtype") if name in about}
    else:
        if options.data is None:
            raise ValueError("--data: wanted a text file, on which the loss is measured")
        from thunder_moe.integrations.huggingface.text import load_model, token_windows

        windows = token_windows(options.model, options.data, options.tokens, options.context)
        model = load_model(options.model, options.dtype, options.device)
        found = measure_sensitivity(
            model, windows, filter=options.filter, ignore=options.ignore, progress=not options.quiet
        )
        about = {"model": options.model, "data": options.data, "context": options.context, "dtype": options.dtype}
    write(files[0], found, **about)  # written at once: the measurement took long, and later steps may fail
    choice = choose_formats(found, options.budget) if options.budget is not None else None
    if choice is not None:
        measured = None
        if model is not None and windows is not None:
            measured = measure_choice(model, windows, choice.formats) - found.loss
        more = {"budget_gb": options.budget, "formats": choice.formats, "bytes": choice.nbytes}
        write(files[0], found, **about, **more, predicted_increase=choice.increase, measured_increase=measured)
    formats = choice.formats if choice is not None else None
    if not options.no_plot:
        plot(found, files[1], formats)
    lines = [table(found, formats), f"loss in 16 bits: {found.loss:.6f} nats per token, of {found.tokens} tokens"]
    if choice is not None:
        lines.append(_summary(choice, measured, options.budget))
    lines.append("wrote " + " and ".join(str(file) for file in files[: 1 if options.no_plot else 2]))
    return "\n".join(lines)


def _output_files(output: Path) -> tuple[Path, Path]:
    """Return the files to write, JSON and plot; an error before hours of work rather than after them."""
    folder = output.absolute().parent
    if not folder.is_dir():
        raise FileNotFoundError(f"--output: no folder {str(folder)!r}, wanted one that exists")
    if output.name in ("", ".."):
        raise ValueError(f"--output: got {str(output)!r}, wanted a name without suffix for the files")
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"--output: the folder {str(folder)!r} cannot be written")
    files = output.parent / f"{output.name}.json", output.parent / f"{output.name}.png"
    for file in files:
        if file.is_dir():
            raise IsADirectoryError(f"--output: {str(file)!r} is a folder, wanted another name")
    return files


def _summary(choice: Choice, measured: float | None, budget: float) -> str:
    counts: dict[str, int] = {}
    for format in choice.formats.values():
        counts[format or WIDE] = counts.get(format or WIDE, 0) + 1
    kinds = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    text = (
        f"chosen for {budget:g} GB: {kinds}; {choice.nbytes / 1e9:.6g} GB,"
        f" increase of the loss {choice.increase:+.6f} if increases add up"
    )
    return text if measured is None else f"{text}, {measured:+.6f} measured"
