"""Groups of processes for tests: results, failures and deaths of a rank while others wait, new groups afterwards.
Called by pytest; calls processes.
"""

import os
import time

import processes
import pytest
import torch.distributed as dist
from processes import COLLECTIVE


def rank_of_all():
    return dist.get_rank()


def fails(how):
    """The last rank fails before a collective that the others wait in."""
    if dist.get_rank() == 1:
        if how == "dies":
            os._exit(3)
        raise ValueError("no reason")
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", "rank 1: .*ValueError: no reason"),
        ("dies", "rank 1: ended with status 3"),
    ],
)
def test_a_rank_that_fails_keeps_nobody_waiting(ranks, how, message, monkeypatch):
    monkeypatch.setattr(processes, "_GRACE", 0.2)
    group = ranks(2)
    assert group(rank_of_all) == [0, 1]
    begin = time.monotonic()
    with pytest.raises(AssertionError, match=f"(?s){message}"):
        group(fails, how)
    assert time.monotonic() - begin < COLLECTIVE, "not the timeout of a collective"
    assert not any(process.is_alive() for process in group._processes)
    assert ranks(2)(rank_of_all) == [0, 1]


def test_a_call_without_an_answer_ends_the_group(ranks):
    group = ranks(2)
    with pytest.raises(AssertionError, match="rank 0: no answer"):
        group(time.sleep, 60, timeout=0.5)
    assert not group.alive
