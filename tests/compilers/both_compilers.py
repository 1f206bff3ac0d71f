"""One name for each way to compile: "thunder", or "dynamo-" and the inner compiler of the torch.compile backend.
Called by the tests of both compilers; calls thunder.jit and torch.compile.
"""

import thunder
import torch

from thunder_moe import moe_executor, rewrite_report


def compile_by(compiler, function, *, format=None, **options):
    """Compile a function, without graph breaks; `format` is the option that chooses number formats."""
    if compiler == "thunder":
        return thunder.jit(function, executors=[moe_executor], **({} if format is None else {"moe_format": format}))
    own = {"thunder_moe.inner": compiler.removeprefix("dynamo-")}
    own |= {} if format is None else {"thunder_moe.format": format}
    return torch.compile(function, backend="thunder_moe", fullgraph=True, options=own, **options)


def by_dynamo(function, inner="aot_eager", **options):
    return compile_by(f"dynamo-{inner}", function, **options)


def decisions(compiled):
    return [entry.decision for entry in rewrite_report(compiled)]
