"""Recognizes routers written in torch's operations: the `moe_router` that computes what they do.
Called by dynamo/routers.py and thunder/routers.py, each with its program as a `RouterGraph`; calls kernels.cuda.router.

    scores = softmax(logits) or sigmoid(logits)
    choice = scores [+ bias]                                  of the top_groups best groups of experts alone:
             [.masked_fill(~mask, -inf or 0)]                 mask (T, E) = ones scattered to the topk of
                                                              choice.view(T, G, E // G).topk(2)[0].sum(-1) or .amax(-1)
    ids = choice.topk(A)[1];  weights = scores.gather(1, ids), or the values of that topk without a bias
    weights / (weights.sum(-1, keepdim=True) [+ epsilon]) * scale, .to(dtype): any of these

or ids of the topk of the logits, and weights = softmax or sigmoid of its values.
Legend: T tokens, E experts, A = top_k, G groups.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from thunder_moe.compilers.report import RouterEntry
from thunder_moe.compilers.spellings import MismatchError, Operations, is_number, require
from thunder_moe.kernels.cuda.router import unserved_reason
from thunder_moe.ops.checks import ACTIVATION_DTYPES as _DTYPES
from thunder_moe.routing import RouterConfig

_SCORES = ("softmax", "sigmoid")
_LAST = (-1, 1)


class RouterGraph(Operations, Protocol):
    """A program whose tensors are identified by their contents: an in-place change makes another tensor. All operations
    that `keeps_order` are of the kind "view".
    """

    def result(self, operation: Any, index: int = 0) -> Any:
        """Return a result of an operation; None if nothing reads it, or it is read in an unknown way."""

    def readers(self, tensor: Any) -> set[Any]:
        """Return the operations that read a tensor; the program's end is one of them."""

    def example(self, tensor: Any) -> Any:
        """Return a tensor's shape, dtype, device and ndim; None for what is not a tensor."""


@dataclass(eq=False)
class RouterMatch:
    """A router of a program."""

    top_k: Any  # the operation that chooses the experts
    takes: Any  # the operation that takes the scores of the chosen experts: `top_k` itself, or a gather
    logits: Any  # (T, E)
    bias: Any = None  # (E,) or (1, E), None without one
    scores: Any = None  # the tensor of final scores (T, A)
    operations: dict[Any, None] = field(default_factory=dict)  # its operations, each once
    choosing: set[Any] = field(default_factory=set)  # the operations among them that no gradient passes
    options: dict[str, Any] = field(default_factory=dict)  # the options of `moe_router`, but for scores_dtype

    @property
    def form(self) -> RouterConfig:
        """Return the options, with the defaults of others."""
        return RouterConfig(**self.options)

    def entry(self, graph: RouterGraph, reason: str | None, where: str | None = None) -> RouterEntry:
        """Return the decision for the report; `reason` says why the router is not rewritten, None if it is."""
        logits, form = graph.example(self.logits), self.form
        tokens = logits.shape[0] if isinstance(logits.shape[0], int) else None
        bias = "" if self.bias is None else ", bias"
        grouped = f", {form.top_groups} of {form.num_groups} groups" if form.grouped else ""
        fused = f"{form.score}{bias}{grouped} and top-k in one operator"
        decision = ("moe_router", fused) if reason is None else ("as written", reason)
        return RouterEntry(0, int(logits.shape[1]), form.top_k, tokens, *decision, where=where)


def match_router(graph: RouterGraph, top_k: Any) -> RouterMatch | None:
    """Return the router whose choice of experts is a given "topk"; None if the operations around it form no router."""
    try:
        return _Matcher(graph, top_k).match()
    except MismatchError:
        return None


def reason_against_kernels(graph: RouterGraph, match: RouterMatch) -> str | None:
    """Return why no kernel runs a router; None if one does."""
    logits, scores, form = graph.example(match.logits), graph.example(match.scores), match.form
    if logits.dtype not in _DTYPES or logits.device.type not in ("cpu", "cuda"):
        return "its logits are not a tensor of 16 or 32 bits on a CPU or CUDA device"
    if scores.dtype not in _DTYPES:
        return f"its scores are {scores.dtype}"
    if match.bias is not None and graph.example(match.bias).device != logits.device:
        return "its bias is on another device"
    kept = logits.shape[1] // form.num_groups * form.top_groups
    if form.top_k > kept:
        return f"it chooses {form.top_k} of the {kept} experts of its groups"
    reason = unserved_reason(logits.shape[1], form)
    return None if reason is None else f"no kernel serves {reason}"


class _Matcher:
    def __init__(self, graph: RouterGraph, top_k: Any) -> None:
        self.graph = graph
        self.found = RouterMatch(top_k, top_k, None)

    def match(self) -> RouterMatch:
        graph, found = self.graph, self.found
        given = self.given(found.top_k, "topk")
        compared = given["input"]
        self.top_k_of(given)
        shape = self.shape(compared, 2)
        require(isinstance(shape[1], int))
        self.experts: int = shape[1]
        self.detached = False
        scores = self.behind_choice(compared)
        makes = graph.maker(scores)
        found.options |= dict(top_k=given["k"], normalize=False)
        if graph.kind(makes) in _SCORES and graph.example(scores).dtype == torch.float32:
            found.logits = self.of_scores(makes)
            self.take(scores, compared)
        else:
            require(scores is compared)
            self.take(scores, compared)
            found.logits = compared
            self.scores_of_chosen()
        self.follow()
        self.behind_casts()
        found.operations = dict.fromkeys([*found.operations, found.top_k, found.takes])
        return found

    # ---- the choice

    def behind_choice(self, compared: Any) -> Any:
        """Return the scores that a choice is made by: behind a mask of groups and a bias."""
        graph, found = self.graph, self.found
        choice = self.behind_detach(compared)
        operation = graph.maker(choice)
        if graph.kind(operation) == "masked_fill":
            self.add_choosing(operation)
            choice = self.behind_groups(operation)
            operation = graph.maker(choice)
        if graph.kind(operation) == "add":
            given = self.given(operation, "add")
            for scores, bias in ((given["input"], given["other"]), (given["other"], given["input"])):
                example = graph.example(bias)
                if example is None or tuple(example.shape) not in ((self.experts,), (1, self.experts)):
                    continue
                source = self.behind_detach(scores, add=False)
                if graph.example(source) is None or graph.kind(graph.maker(source)) not in _SCORES:
                    continue
                require(example.dtype in _DTYPES and graph.example(choice).dtype == torch.float32)
                self.add_choosing(operation)
                found.bias = bias
                return self.behind_detach(scores)
            raise MismatchError
        return choice

    def behind_groups(self, operation: Any) -> Any:
        """Return the choice behind a mask of all but the best groups of experts."""
        graph, found = self.graph, self.found
        given, keeps = graph.given(operation), False
        choice, mask, fill = given.get("input"), given.get("mask"), given.get("value")
        require(self.shape(choice, 2)[1] == self.experts and self.shape(mask, 2)[1] == self.experts)
        require(isinstance(fill, (int, float)) and not isinstance(fill, bool) and fill in (0, -math.inf))
        while (kind := graph.kind(graph.maker(mask))) in ("not", "cast"):
            mask = self.choosing_input(mask)
            require(kind == "cast" or graph.example(mask).dtype == torch.bool)  # ~1 is -2
            keeps ^= kind == "not"
        require(keeps)
        # (T, G) -> (T, G, 1) -> (T, G, E // G) -> (T, E)
        mask = self.choosing_input(mask, "view")
        groups, size = self.shape(mask, 3)[1:]
        require(groups * size == self.experts)
        mask = self.choosing_input(mask, "expand")
        require(tuple(self.shape(mask, 3)[1:]) == (groups, 1))
        mask = self.choosing_input(mask, "view")
        require(self.shape(mask, 2)[1] == groups)
        scatter = graph.maker(mask)
        scattered = self.given(scatter, "scatter")
        one = scattered.get("value")  # may be a tensor of the program
        require(scattered.get("dim") in _LAST and isinstance(one, (int, float)) and one == 1)
        zeros = graph.maker(scattered["input"])
        while graph.kind(zeros) == "cast":
            self.add_choosing(zeros)
            zeros = graph.maker(graph.given(zeros)["input"])
        require(graph.kind(zeros) == "zeros")
        best = graph.maker(scattered["index"])
        require(graph.kind(best) == "topk" and graph.result(best, 1) is scattered["index"])
        self.add_choosing(scatter, zeros, best)
        of_groups = graph.given(best)
        self.top_k_of(of_groups)
        best_of = self.behind_group_scores(of_groups["input"], choice, groups)
        # Zeros belong to other groups' experts. Scores are not negative, so without a bias no such expert outranks the
        # best.
        to_zero = fill == 0 and graph.kind(graph.maker(choice)) == "add"
        found.options |= dict(
            num_groups=int(groups), top_groups=of_groups["k"], group_best=best_of, mask_to_zero=to_zero
        )
        return choice

    def behind_group_scores(self, scores: Any, choice: Any, groups: int) -> int:
        """Return how many of each group's best experts its score is the sum of."""
        graph = self.graph
        operation = graph.maker(scores)
        given = graph.given(operation)
        require(graph.kind(operation) in ("sum", "max") and self.shape(scores, 2)[1] == groups)
        require(given.get("dim") in (-1, 2, [-1], (-1,), [2], (2,)) and given.get("keepdim", False) is False)
        self.add_choosing(operation)
        best, parts = 1, given["input"]
        if graph.kind(operation) == "sum":
            require(given.get("dtype") is None)
            top = graph.maker(parts)
            inner = self.given(top, "topk")
            self.top_k_of(inner, last=(-1, 2))
            require(graph.result(top, 0) is parts)
            self.add_choosing(top)
            best, parts = inner["k"], inner["input"]
        else:
            require(graph.result(operation, 0) is scores)
        shape = self.shape(parts, 3)
        require(shape[1] == groups and groups * shape[2] == self.experts and best <= shape[2])
        require(self.choosing_input(parts, "view") is choice)
        return best

    # ---- the scores

    def of_scores(self, operation: Any) -> Any:
        """Return the logits that an operation turns into scores."""
        given = self.graph.given(operation)
        if self.graph.kind(operation) == "softmax":
            require(given.get("dim") in _LAST)
        self.shape(given["input"], 2)
        self.found.options["score"] = self.graph.kind(operation)
        self.found.operations[operation] = None
        return given["input"]

    def take(self, scores: Any, compared: Any) -> None:
        """Find what takes the scores of the chosen experts: a gather, or the top-k that chooses."""
        graph, found = self.graph, self.found
        ids, values = graph.result(found.top_k, 1), graph.result(found.top_k, 0)
        sources = (scores,) if found.bias is not None or self.detached else (scores, compared)
        for operation in sorted(() if ids is None else graph.readers(ids), key=repr):
            given = graph.given(operation) if graph.kind(operation) == "gather" else {}
            if given.keys() != {"input", "dim", "index"} or given["dim"] not in _LAST or given["index"] is not ids:
                continue
            if any(given["input"] is source for source in sources):
                found.takes, found.scores = operation, graph.result(operation)
                found.choosing.add(found.top_k)
                return
        require(values is not None and found.bias is None and not self.detached)
        found.scores = values

    def scores_of_chosen(self) -> None:
        """Find the softmax or sigmoid of the logits of the chosen experts."""
        graph, found = self.graph, self.found
        wide = self.only_reader(found.scores)
        if graph.kind(wide) == "cast" and graph.example(graph.result(wide)).dtype == torch.float32:
            found.operations[wide] = None
            found.scores = graph.result(wide)
            wide = self.only_reader(found.scores)
        require(graph.kind(wide) in _SCORES)
        require(self.of_scores(wide) is found.scores)
        result = graph.result(wide)
        require(graph.example(result).dtype in (torch.float32, graph.example(found.scores).dtype))
        found.options["normalize"] = found.options["score"] == "softmax"
        found.scores = result

    def follow(self) -> None:
        """Add the known operations on the scores: normalization, a scale, and finally a cast."""
        graph, found = self.graph, self.found
        with contextlib.suppress(MismatchError):
            while graph.example(found.scores).dtype == torch.float32:
                readers = graph.readers(found.scores)
                operations, options = (self.normalization if len(readers) == 2 else self.scale_or_cast)(readers)
                result = graph.result(operations[-1])
                require(result is not None)
                found.operations |= dict.fromkeys(operations)
                found.options |= options
                found.scores = result

    def scale_or_cast(self, readers: set[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return (operations, options) of the one that multiplies, divides or casts the scores."""
        graph, found = self.graph, self.found
        require(len(readers) == 1)
        (operation,) = readers
        kind, given = graph.kind(operation), graph.given(operation)
        if kind == "cast":
            before, after = graph.example(found.scores), graph.example(graph.result(operation))
            require(after is not None and after.dtype in _DTYPES and after.device == before.device)
            return [operation], {}
        require(kind in ("mul", "div") and "scale" not in found.options)
        scores, factor = given["input"], given["other"]
        if kind == "mul" and is_number(scores):
            scores, factor = factor, scores
        require(scores is found.scores and is_number(factor) and (kind == "mul" or factor != 0))
        return [operation], dict(scale=float(factor) if kind == "mul" else 1.0 / factor)

    def normalization(self, readers: set[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return (operations, options) of ``scores / (sum of scores)``, in this order."""
        graph, found = self.graph, self.found
        require(not found.options["normalize"] and "scale" not in found.options)
        total = next((operation for operation in readers if graph.kind(operation) == "sum"), None)
        given = self.given(total, "sum")
        last = given.get("dim") in (*_LAST, [-1], (-1,), [1], (1,))
        require(last and given.get("keepdim") is True and "dtype" not in given)
        operations, divisor, options = [total], graph.result(total), dict[str, Any](normalize=True)
        for kind, name in (("add", "epsilon"), ("clamp", "least_sum")):
            operation = self.only_reader(divisor)
            if graph.kind(operation) != kind:
                continue
            given = graph.given(operation)
            numbers = [value for value in given.values() if is_number(value)]
            require(len(given) == 2 and any(value is divisor for value in given.values()))
            require("max" not in given and len(numbers) == 1 and numbers[0] >= 0)
            options[name] = float(numbers[0])
            operations.append(operation)
            divisor = graph.result(operation)
        (divide,) = readers - {total}
        given = self.given(divide, "div")
        require(given.get("input") is found.scores and given.get("other") is divisor)
        require(graph.readers(divisor) == {divide})
        return [*operations, divide], options

    def behind_casts(self) -> None:
        """Return the logits before a cast to float32, which `moe_router` does itself."""
        graph, found = self.graph, self.found
        operation = graph.maker(found.logits)
        if graph.kind(operation) != "cast":
            return
        source = graph.given(operation)["input"]
        wide, narrow = graph.example(found.logits), graph.example(source)
        if narrow is None or narrow.dtype not in _DTYPES or narrow.device != wide.device or narrow.ndim != 2:
            return
        if wide.dtype == torch.float32 or wide.dtype == narrow.dtype:
            found.operations = {operation: None, **found.operations}
            found.logits = source

    # ---- parts of the pattern

    def given(self, operation: Any, kind: str) -> dict[str, Any]:
        require(self.graph.kind(operation) == kind)
        return self.graph.given(operation)

    def top_k_of(self, given: dict[str, Any], last: tuple[int, ...] = _LAST) -> None:
        """Require arguments that ask for the k largest values along the last dimension."""
        named = given.get("dim", -1) in last and given.get("largest", True) is True
        require(named and isinstance(given.get("k"), int) and given["k"] >= 1)

    def shape(self, tensor: Any, ndim: int) -> tuple[Any, ...]:
        example = self.graph.example(tensor)
        require(example is not None and len(example.shape) == ndim)
        return tuple(example.shape)

    def only_reader(self, tensor: Any) -> Any:
        readers = self.graph.readers(tensor)
        require(len(readers) == 1)
        return next(iter(readers))

    def choosing_input(self, tensor: Any, kind: str | None = None) -> Any:
        """Return what an operation, which has to be of a kind, makes a tensor of."""
        operation = self.graph.maker(tensor)
        require(kind is None or self.graph.kind(operation) == kind)
        self.add_choosing(operation)
        source = self.graph.given(operation)["input"]
        require(kind != "view" or self.same_dtype(source, tensor))
        return source

    def behind_detach(self, tensor: Any, *, add: bool = True) -> Any:
        """Return what a tensor is behind views of the same shape, and detached from."""
        graph = self.graph
        while (kind := graph.kind(operation := graph.maker(tensor))) in ("detach", "view"):
            source = graph.given(operation)["input"]
            if kind == "view" and not self.same_shape(source, tensor):
                break
            if add:
                self.detached |= kind == "detach"
                self.add_choosing(operation)
            tensor = source
        return tensor

    def same_shape(self, first: Any, second: Any) -> bool:
        """True if both are (any, E) of one dtype: a view of one is the other then."""
        examples = self.graph.example(first), self.graph.example(second)
        alike = all(each is not None and len(each.shape) == 2 and each.shape[1] == self.experts for each in examples)
        return alike and self.same_dtype(first, second)

    def same_dtype(self, first: Any, second: Any) -> bool:
        """True if a view has the numbers of its source: one of another dtype takes their bits for others."""
        examples = self.graph.example(first), self.graph.example(second)
        return all(each is not None for each in examples) and bool(examples[0].dtype == examples[1].dtype)

    def add_choosing(self, *operations: Any) -> None:
        self.found.operations |= dict.fromkeys(operations)
        self.found.choosing |= set(operations)
