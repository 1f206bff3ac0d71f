"""Tests the writes that are assumed of a node of an FX graph with unknown effects.
Called by pytest.
"""

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from thunder_moe.compilers.dynamo.effects import program_of, storages_of


def refuses(tensor):
    raise NotImplementedError("no fake tensors")


def test_a_function_that_cannot_be_run_on_example_values_may_write_what_it_reads():
    graph = fx.Graph()
    with FakeTensorMode() as mode:
        values = {graph.placeholder(name): torch.empty(4) for name in ("read", "other")}
    read, other = values
    node = graph.call_function(refuses, (read,))
    values[node] = mode.from_tensor(torch.empty(4))
    program = program_of(graph, dict.fromkeys(graph.nodes, False), values.get, {})
    assert "may be changed in place by refuses" in program.reason_against_packing(storages_of(values[read]))
    assert program.reason_against_packing(storages_of(values[other])) is None


@pytest.mark.parametrize(("name", "writes"), [("mul_", True), ("mul", False)])
def test_a_nested_graph_called_with_other_tensors_than_it_was_traced_with(name, writes):
    body, outer = fx.Graph(), fx.Graph()
    with FakeTensorMode():
        traced_with, called_with = torch.empty(4), torch.empty(4)
    inside = {body.placeholder("x"): traced_with}
    body.call_method(name, (*inside, 2))
    nested = program_of(body, dict.fromkeys(body.nodes, False), inside.get, {}), storages_of(traced_with)
    values = {outer.placeholder("x"): called_with}
    call = outer.call_function(torch.ops.higher_order.tag_activation_checkpoint, (None, *values))
    program = program_of(outer, dict.fromkeys(outer.nodes, False), values.get, {call: [nested]})
    assert (program.reason_against_packing(storages_of(called_with)) is not None) == writes
