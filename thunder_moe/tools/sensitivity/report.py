"""The table and the plot of a measurement.
Called by the command line; calls matplotlib, of the extra [bench], for the plot.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from thunder_moe.formats.registry import FORMATS
from thunder_moe.tools.sensitivity.measure import WIDE, Sensitivity

_COLOURS = {"nvfp4": "tab:orange", "mxfp8": "tab:blue", WIDE: "tab:gray"}


def table(found: Sensitivity, formats: Mapping[str, str | None] | None = None) -> str:
    """Return a line per block: megabytes and increase of the loss in each format, and which is chosen."""
    width = max(len("block"), *(len(block.name) for block in found.blocks))
    head = f"{'block':{width}}  {'16-bit MB':>10}"
    for name in FORMATS:
        head += f"  {name + ' MB':>10}  {'increase':>10} {'(+-)':>9}"
    lines = [head + ("  chosen" if formats else "")]
    for block in found.blocks:
        line = f"{block.name:{width}}  {block.nbytes[WIDE] / 1e6:10.3f}"
        for name in FORMATS:
            if name in block.nbytes:
                line += f"  {block.nbytes[name] / 1e6:10.3f}  {block.increase[name]:+10.6f} {block.error[name]:9.6f}"
            else:
                line += f"  {'-':>10}  {'-':>10} {'-':>9}"
        lines.append(line + (f"  {formats[block.name] or WIDE}" if formats else ""))
    return "\n".join(lines)


def require_matplotlib() -> None:
    """Raises an ImportError that says how to get it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError("the plot needs matplotlib: pip install 'thunder_moe[bench]', or give --no-plot") from error


def plot(found: Sensitivity, path: Path, formats: Mapping[str, str | None] | None = None) -> None:
    """Draws the increase of the loss by block with standard errors, and a strip of the chosen formats below."""
    from matplotlib.figure import Figure

    count = len(found.blocks)
    figure = Figure(figsize=(max(6.0, min(16.0, 2 + 0.25 * count)), 4.2), layout="constrained")
    heights = [12, 1] if formats else [1]
    axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    for name in FORMATS:
        points = [(i, b.increase[name], b.error[name]) for i, b in enumerate(found.blocks) if name in b.increase]
        if points:
            x, y, error = zip(*points, strict=True)
            axes[0].errorbar(x, y, error, fmt="o-", ms=4, lw=1, capsize=2, color=_COLOURS[name], label=name.upper())
    axes[0].axhline(0, color="black", lw=0.8)
    axes[0].set_ylabel("loss more than in 16 bits\n(nats per token)")
    axes[0].set_title(
        f"each block of experts alone, loss in 16 bits {found.loss:.4f}, {found.tokens} tokens", fontsize=10
    )
    axes[0].legend()
    if formats:
        for name, colour in _COLOURS.items():
            places = [i for i, block in enumerate(found.blocks) if (formats[block.name] or WIDE) == name]
            axes[1].bar(places, 1, width=0.9, color=colour, label=name if name == WIDE else name.upper())
        axes[1].set_yticks([])
        axes[1].set_ylabel("chosen", rotation=0, ha="right", va="center")
        if any(format is None for format in formats.values()):
            axes[1].legend(fontsize=7, loc="center right")
    axes[-1].set_xlabel("block of experts")
    axes[-1].locator_params(axis="x", integer=True)
    figure.savefig(path, dpi=150)
