"""The command line, ``python -m thunder_moe``: `convert` writes a checkpoint with NVFP4 or MXFP8 weights, `sensitivity`
measures what each number format costs a model. Called by the shell; calls convert, calibrate, sensitivity.command.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import shutil
import sys
from collections.abc import Callable, Collection, Sequence
from math import isinf
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thunder_moe.checkpoint import LayerError, convert
from thunder_moe.checkpoint.choice import choose
from thunder_moe.checkpoint.files import expand_user
from thunder_moe.checkpoint.partial import partial_path
from thunder_moe.checkpoint.reader import Checkpoint
from thunder_moe.checkpoint.writer import parse_size, require_absent
from thunder_moe.dense_names import is_encoder, is_linear
from thunder_moe.formats.block_format import NVFP4

_SENSITIVITY = (
    "Measures what a Hugging Face model loses on a text with each block of experts alone in NVFP4 and in MXFP8, and"
    " prints a table; writes OUTPUT.json and OUTPUT.png. With --budget it chooses the format of each block with the"
    " least sum of losses whose model fits, by dynamic programming (exact, if losses of blocks add up), and measures"
    " that choice; OUTPUT.json is then what quantize_(format=load_formats(FILE)) and `convert --formats FILE` take."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0, 1 after an error, 130 after an interruption."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files that a log in ASCII cannot hold
    options = _parser().parse_args(arguments)
    logging.basicConfig(format="%(message)s", level=logging.WARNING if options.quiet else logging.INFO)
    try:
        if options.command == "sensitivity":
            from thunder_moe.tools.sensitivity import command  # takes a second or more, which `convert` does not need

            said = command.run(options)
        else:
            windows = _report_windows(options)
            said = f"{_convert(options)}\nwrote {options.destination}"
            if windows is not None:
                if not options.quiet:
                    _print(said)
                said = _report(options, windows)
    except (ValueError, OSError, ImportError, MemoryError, torch.OutOfMemoryError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        resumes = options.command == "convert" and not expand_user(options.destination, "destination").exists()
        hint = "; run the same command to resume" if resumes else ""
        print(f"interrupted{hint}", file=sys.stderr)
        return 130
    if not options.quiet:
        _print(said)
    return 0


def _convert(options: argparse.Namespace) -> Any:
    """Writes the checkpoint; returns the table of errors."""
    if options.calibrate is not None:
        return _convert_calibrated(options)
    selection: dict[str, Any] = dict(filter=options.filter, ignore=options.ignore, linears=options.linears or None)
    selection["format"] = _format(options.format, options.formats)
    errors = convert(
        options.source,
        options.destination,
        **selection,
        scale_search=_scale_search(options, lambda: choose(Checkpoint(options.source), **selection).formats.values()),
        device=options.device,
        max_shard_size=options.max_shard_size,
        progress=not options.quiet,
    )
    return summary(errors)


def _report_windows(options: argparse.Namespace) -> torch.Tensor | None:
    """Return the text of `--report`, if there is one: errors come before the work."""
    if options.report is None:
        return None
    from thunder_moe.integrations.huggingface.text import token_windows

    if options.calibrate is not None and Path(options.report).resolve() == Path(options.calibrate).resolve():
        raise ValueError(f"--report: got {options.report!r} as for --calibrate, wanted a text that it has not seen")
    return token_windows(options.source, options.report, options.tokens, options.context, "--report")


def _report(options: argparse.Namespace, windows: torch.Tensor) -> str:
    """Compares the written model with its source, writes JSON and plot beside it; returns the table."""
    from thunder_moe.integrations.huggingface.checkpoint import load_checkpoint
    from thunder_moe.integrations.huggingface.text import load_model
    from thunder_moe.tools.conversion import measure_conversion

    destination = expand_user(options.destination, "destination")
    reference = load_model(options.source, "auto", options.device)
    converted = load_checkpoint(destination, device=options.device)
    found = measure_conversion(reference, converted, windows, progress=not options.quiet)
    files = [destination.with_name(f"{destination.name}.report.{kind}") for kind in ("json", "png")]
    found.save(files[0], source=options.source, text=options.report)
    try:
        found.plot(files[1])
    except ImportError:
        return f"{found}\nwrote {files[0]}, and no plot: it needs matplotlib, pip install 'thunder_moe[bench]'"
    return f"{found}\nwrote {files[0]} and {files[1]}"


def _convert_calibrated(options: argparse.Namespace) -> Any:
    """Loads a 16-bit model into main memory, calibrates it on a text and writes it; returns the table of errors."""
    from thunder_moe.integrations.huggingface.checkpoint import save_checkpoint
    from thunder_moe.integrations.huggingface.text import load_model, token_windows
    from thunder_moe.quantization.calibrate import calibrate_
    from thunder_moe.quantization.quantize import plan_quantization

    def linears(linear: Any, name: str) -> bool:  # the dense layers that `convert` takes by their names
        return is_linear(name) and not is_encoder(name) and linear.in_features % NVFP4.block_size == 0

    destination, size = expand_user(options.destination, "destination"), parse_size(options.max_shard_size)
    require_absent(destination, "destination")
    windows = token_windows(options.source, options.calibrate, options.tokens, options.context, "--calibrate")
    model = load_model(options.source, "auto", "cpu")
    selection: dict[str, Any] = dict(filter=options.filter, ignore=options.ignore)
    selection |= dict(linears=linears if options.linears else False, format=_format(options.format, options.formats))
    found = calibrate_(
        model,
        windows.split(1),
        **selection,
        scale_search=_scale_search(
            options, lambda: [module.format for module in plan_quantization(model, **selection).modules]
        ),
        device=None if options.device == "cpu" else options.device,
        destination=destination,
        progress=not options.quiet,
    )
    save_checkpoint(model, destination, max_shard_size=size)
    shutil.rmtree(partial_path(destination))
    return found


def _print(text: str) -> None:
    """Prints the result of a command that has succeeded; a closed pipe or a full disk is not an error."""
    try:
        print(text, flush=True)
    except OSError as error:  # a closed pipe, a full disk
        print(f"the work is done, but standard output cannot be written ({error})", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes the rest at its end


def summary(errors: Sequence[LayerError]) -> str:
    """Return a table of the layers: signal to quantization noise of experts and dense layers, and bytes."""
    width = max(len("experts"), *(len(error.name) for error in errors))
    lines = [f"{'experts':{width}}  {'gate, up':>9}  {'down':>9}  {'MB':>9}"]
    for error in errors:
        values = (error.gate_up, error.down)
        cells = ["" if value is None else "exact" if isinf(value) else f"{value:.2f} dB" for value in values]
        lines.append(f"{error.name:{width}}  {cells[0]:>9}  {cells[1]:>9}  {error.nbytes / 1e6:9.1f}")
    return "\n".join(lines)


def _format(name: str, file: str | None) -> str | Callable[[nn.Module, str], str | None]:
    """Return `convert`'s option `format`: the formats of a file of `sensitivity`, and `name` for dense layers."""
    if file is None:
        return name
    from thunder_moe.tools.sensitivity.formats_file import format_of_path, read_formats

    formats = read_formats(file)

    def format_of(module: nn.Module, path: str) -> str | None:
        if isinstance(module, nn.Linear):  # a dense layer
            return name
        try:
            return format_of_path(formats, path)
        except KeyError:
            raise ValueError(f"--formats: {file!r} has none for {path!r}, wanted the file of this model") from None

    return format_of


def _scale_search(options: argparse.Namespace, chosen: Callable[[], Collection[str | None]]) -> str | None:
    """Return `convert`'s option `scale_search`: by default "mse" if a weight becomes NVFP4, which alone has it.

    `chosen` returns the formats of the weights that the options choose; only `--formats` has several.
    """
    if options.scale_search is not None:
        return None if options.scale_search == "none" else str(options.scale_search)
    return "mse" if NVFP4.name in ([options.format] if options.formats is None else chosen()) else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m thunder_moe", description="NVFP4 and MXFP8 weights for MoE models."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "convert",
        help="write a checkpoint with NVFP4 or MXFP8 weights",
        description=(
            "Writes a checkpoint whose experts are NVFP4 or MXFP8, in ModelOpt's form (W4A16_NVFP4, MXFP8, or"
            " MIXED_PRECISION of the two), from a 16-bit or FP8 one of Hugging Face, or exactly from MXFP4 (GPT-OSS, as"
            " NVFP4) or compressed-tensors; dense layers that are NVFP4 or MXFP8 stay so. Goes layer by layer, never"
            " holds the whole model, and resumes an interrupted conversion. Nothing is overwritten."
        ),
    )
    command.add_argument("source", help="directory of the checkpoint, or name of a model in the local hub cache")
    command.add_argument("destination", help="directory to create; unfinished work is in DESTINATION.partial")
    _add_selection(command, "experts and dense layers")
    command.add_argument(
        "--format",
        type=str.lower,
        choices=["nvfp4", "mxfp8"],
        default="nvfp4",
        help="the number format (default: %(default)s)",
    )
    command.add_argument(
        "--formats", metavar="FILE", help="JSON of `sensitivity --budget`: the format of each block of experts"
    )
    command.add_argument(
        "--linears",
        action="store_true",
        help="also dense layers: attention, dense MLPs and shared experts, not the head",
    )
    command.add_argument(
        "--scale-search",
        choices=["mse", "none"],
        help="mse: try a few scales per block of NVFP4, keep the one of least error (default); none: the usual scale,"
        " which gives the bytes of quantize_ and of nvidia-modelopt, in less than half of the time on a CPU",
    )
    command.add_argument(
        "--calibrate",
        metavar="TEXT",
        help="a text file (UTF-8): round so that the outputs on it change little (GPTQ). Loads the whole"
        " model with transformers, whose names the patterns take",
    )
    command.add_argument(
        "--report",
        metavar="TEXT",
        help="another text file (UTF-8): compare the result with the 16-bit SOURCE on it; writes"
        " DESTINATION.report.json and DESTINATION.report.png. Loads both models with transformers",
    )
    command.add_argument("--tokens", type=int, default=65536, help="of TEXT, at most (default: %(default)s)")
    command.add_argument("--context", type=int, default=512, help="tokens of TEXT in a row (default: %(default)s)")
    command.add_argument("--device", default="cpu", help="where to quantize (default: %(default)s)")
    command.add_argument("--max-shard-size", default="2GB", help="largest file (default: %(default)s)")
    command.add_argument("--quiet", action="store_true", help="no progress and no table")
    _add_sensitivity(commands)
    return parser


def _add_selection(command: argparse.ArgumentParser, what: str) -> None:
    pattern = "a name, a glob such as '*.layers.0.*', or 're:' and a regular expression (repeat it for several)"
    for option, text in (("--filter", "to take (default: all)"), ("--ignore", "to leave in 16 bits")):
        command.add_argument(option, metavar="PATTERN", action="append", help=f"{what} {text}: {pattern}")


def _add_sensitivity(commands: Any) -> None:
    command: argparse.ArgumentParser = commands.add_parser(
        "sensitivity", help="what each block of experts loses in each number format", description=_SENSITIVITY
    )
    command.add_argument(
        "model",
        metavar="MODEL",
        help="directory or name in the local hub cache, of a 16-bit model; or OUTPUT.json of an earlier run, to choose"
        " for another budget without measuring again",
    )
    command.add_argument("--data", metavar="TEXT", help="a text file (UTF-8)")
    _add_selection(command, "experts")
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


if __name__ == "__main__":
    sys.exit(main())
