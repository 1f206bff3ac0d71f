"""``python -m thunder_moe sensitivity``: measures a model, or reads a measurement, chooses formats, writes and plots.
Called by the command line; calls measure, budget, formats_file, report, and integrations.huggingface.text to load.
"""

from __future__ import annotations

import argparse
from math import isfinite
from pathlib import Path
from typing import Any

from thunder_moe.sensitivity.budget import Choice, choose_formats
from thunder_moe.sensitivity.formats_file import read_sensitivity, write
from thunder_moe.sensitivity.measure import WIDE, measure_choice, measure_sensitivity
from thunder_moe.sensitivity.report import plot, require_matplotlib, table

__all__ = ["add_command", "run"]

_DESCRIPTION = (
    "Measures what a Hugging Face model loses on a text with each block of experts alone in NVFP4 and in MXFP8, and"
    " prints a table; writes OUTPUT.json and OUTPUT.png. With --budget it chooses the format of each block with the"
    " least sum of losses whose model fits, by dynamic programming (exact, if losses of blocks add up), and measures"
    " that choice; OUTPUT.json is then what quantize_ (format=load_formats(FILE)) and `convert --formats FILE` take."
)


def add_command(commands: Any) -> None:
    """Adds the command to the parsers of the command line."""
    command: argparse.ArgumentParser = commands.add_parser(
        "sensitivity", help="what each block of experts loses in each number format", description=_DESCRIPTION
    )
    command.add_argument(
        "model",
        metavar="MODEL",
        help="directory or name in the local hub cache, of a 16-bit model; or OUTPUT.json of an earlier run, to choose"
        " for another budget without measuring again",
    )
    command.add_argument("--data", metavar="TEXT", help="a text file (UTF-8)")
    command.add_argument("--budget", type=float, metavar="GB", help="of all weights of the model, in 10^9 bytes")
    command.add_argument("--tokens", type=int, default=8192, help="of the text, at most (default: %(default)s)")
    command.add_argument("--context", type=int, default=512, help="tokens in a row (default: %(default)s)")
    command.add_argument("--dtype", choices=["auto", "bfloat16", "float16", "float32"], default="auto")
    command.add_argument("--device", default="cpu", help="where to compute (default: %(default)s)")
    command.add_argument(
        "--output", type=Path, default=Path("sensitivity"), help="files to write, without suffix (default: %(default)s)"
    )
    command.add_argument("--no-plot", action="store_true", help="no OUTPUT.png (which needs matplotlib)")
    command.add_argument("--quiet", action="store_true", help="no progress and no table")


def run(options: argparse.Namespace) -> None:
    """Runs the command with its parsed arguments.

    Raises:
        ValueError: an argument, named with its value, or as `measure_sensitivity` and `choose_formats`.
        FileNotFoundError: no model, text or folder of the output.
        ImportError: transformers or matplotlib is missing.
    """
    if options.budget is not None and not (isfinite(options.budget) and options.budget > 0):
        raise ValueError(f"--budget: got {options.budget}, wanted gigabytes above 0")
    output = Path(options.output).expanduser()
    if not output.absolute().parent.is_dir():
        raise FileNotFoundError(f"--output: no folder {str(output.absolute().parent)!r}, wanted one that exists")
    if not options.no_plot:
        require_matplotlib()
    if options.model.endswith(".json"):
        model, windows = None, None
        if options.data is not None:
            raise ValueError(f"--data: got {options.data!r} with a measurement as MODEL, wanted a model, or no --data")
        found, about = read_sensitivity(options.model)
        about = {name: about[name] for name in ("model", "data", "context", "dtype") if name in about}
    else:
        if options.data is None:
            raise ValueError("--data: wanted a text file, on which the loss is measured")
        from thunder_moe.integrations.huggingface.text import load_model, token_windows

        windows = token_windows(options.model, options.data, options.tokens, options.context)
        model = load_model(options.model, options.dtype, options.device)
        found = measure_sensitivity(model, windows, progress=not options.quiet)
        about = {"model": options.model, "data": options.data, "context": options.context, "dtype": options.dtype}
    files = output.parent / f"{output.name}.json", output.parent / f"{output.name}.png"
    write(files[0], found, **about)  # what took long is kept whatever follows
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
    if not options.quiet:
        print(table(found, formats))
        print(f"loss in 16 bits: {found.loss:.6f} nats per token, of {found.tokens} tokens")
        if choice is not None:
            print(_summary(choice, measured, options.budget))
        print("wrote " + " and ".join(str(file) for file in files[: 1 if options.no_plot else 2]))


def _summary(choice: Choice, measured: float | None, budget: float) -> str:
    counts: dict[str, int] = {}
    for format in choice.formats.values():
        counts[format or WIDE] = counts.get(format or WIDE, 0) + 1
    kinds = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    text = (
        f"chosen for {budget:g} GB: {kinds}; {choice.nbytes / 1e9:.6g} GB, loss {choice.increase:+.6f} if losses add up"
    )
    return text if measured is None else f"{text}, {measured:+.6f} measured"
