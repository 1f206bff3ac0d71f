"""The Triton kernels for the adapters of few tokens, in Triton's interpreter, against loops of plain torch.
Called by pytest, where vLLM is installed (`make test-vllm`).
"""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from oracle import relative_error

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # has to be set before Triton is imported


@pytest.mark.skipif(INTERPRETED or find_spec("triton") is None, reason="runs the others, which need Triton")
def test_in_an_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "test_kernels"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


# tokens, top_k, experts, adapters, rank, K, N, parts; odd sizes, several blocks of columns, ranks 4 to 16
SIZES = [(5, 2, 8, 3, 4, 80, 48, 2), (3, 4, 8, 2, 16, 1100, 160, 2), (4, 1, 5, 3, 5, 64, 130, 1)]


@pytest.mark.skipif(not INTERPRETED, reason="test_in_an_interpreter runs them")
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_kernels(sizes, shared):
    from thunder_moe.integrations.vllm import lora_kernels as kernels

    tokens, top_k, experts, loaded, rank, k, n, parts = sizes
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).int()
    adapters = torch.randint(0, loaded, (tokens,))
    ids[0, 0], adapters[1], adapters[2] = -1, -1, 12345  # of nobody; padding of a graph has anything
    slot_row = torch.randperm(tokens * top_k).int().view(tokens, top_k)
    slot_row[0, 0] = -1
    few = 1 if shared else experts
    pairs = [(t, a, int(ids[t, a]), int(adapters[t])) for t in range(tokens) for a in range(top_k)
             if ids[t, a] >= 0 and 0 <= adapters[t] < loaded]  # fmt: skip

    x, rows = torch.randn(tokens, k), torch.randn(tokens * top_k, parts * n)
    a = tuple(torch.randn(loaded, few, rank, k) for _ in range(parts))
    b = tuple(torch.randn(loaded, experts, n, rank) for _ in range(parts))
    if rank == 4:  # each second row of a tensor
        both = torch.randn(loaded, experts, 2 * n, rank)
        b = both[:, :, ::2], both[:, :, 1::2]
    wanted = rows.clone()
    for t, slot, e, s in pairs:
        wanted[slot_row[t, slot]] += torch.cat(
            [up[s, e] @ (down[s, e % few] @ x[t]) for down, up in zip(a, b, strict=True)]
        )
    kernels.expand_rows(rows, kernels.shrink(x, None, ids, adapters, a), slot_row, ids, adapters, b)
    assert relative_error(rows, wanted) < 1e-5

    # out: a share of the columns of a rank's output
    gated, wide, weights = torch.randn(tokens * top_k, n), torch.randn(tokens, k + 32), torch.rand(tokens, top_k)
    out, around = wide[:, 16 : 16 + k], [wide[:, :16].clone(), wide[:, 16 + k :].clone()]
    a, b = torch.randn(loaded, experts, rank, n), torch.randn(loaded, few, k, rank)
    wanted = out.clone()
    for t, slot, e, s in pairs:
        wanted[t] += weights[t, slot] * (b[s, e % few] @ (a[s, e] @ gated[slot_row[t, slot]]))
    kernels.expand_tokens(out, kernels.shrink(gated, slot_row, ids, adapters, (a,)), weights, ids, adapters, b)
    assert relative_error(out, wanted) < 1e-5
    assert torch.equal(wide[:, :16], around[0])
    assert torch.equal(wide[:, 16 + k :], around[1])


@pytest.mark.skipif(not INTERPRETED, reason="test_in_an_interpreter runs them")
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("sizes", [(37, 2, 3, 2, 16, 200, 48, 2), (70, 1, 2, 3, 5, 64, 130, 1)])
def test_kernels_of_sorted_rows(sizes, shared):
    """Blocks of rows: some pairs have several, some have none."""
    from thunder_moe import moe_route
    from thunder_moe.integrations.vllm import lora_sorted as kernels

    tokens, top_k, experts, loaded, rank, k, n, parts = sizes
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).int()
    adapters = torch.where(torch.rand(tokens) < 0.8, 1, torch.randint(-1, loaded, (tokens,)))
    ids[0, 0] = -1
    pairs = torch.where((ids >= 0) & (adapters >= 0)[:, None], adapters[:, None].int() * experts + ids, -1).int()
    row_slot, ends, slot_row = moe_route(pairs, loaded * experts)
    blocks = kernels.blocks(ends, row_slot, experts)
    known = pairs.flatten() >= 0
    adapter, expert = (pairs.flatten() // experts)[known], ids.flatten()[known] % (1 if shared else experts)
    of_all = ids.flatten()[known]

    def random(*shape, few=False):
        return torch.randn(loaded, 1 if few and shared else experts, *shape) * shape[-1] ** -0.5

    x, rows, place = torch.randn(tokens, k), torch.randn(tokens * top_k, parts * n), torch.randperm(tokens * top_k)
    a, b = [random(rank, k, few=True) for _ in range(parts)], [random(n, rank) for _ in range(parts)]
    token, at = known.nonzero()[:, 0] // top_k, place[known]
    wanted = rows.clone()
    for part in range(parts):
        inner = torch.einsum("mrk,mk->mr", a[part][adapter, expert], x[token])
        wanted[at, part * n : (part + 1) * n] += torch.einsum("mnr,mr->mn", b[part][adapter, of_all], inner)
    places = place.int().view(tokens, top_k)
    in_turns = tuple(torch.stack(b, 3).flatten(2, 3)[:, :, part::parts] for part in range(parts))
    kernels.expand_rows(rows, kernels.shrink(x, blocks, top_k, None, tuple(a)), blocks, places, in_turns)
    assert relative_error(rows, wanted) < 1e-5

    gated, weights = torch.randn(tokens * top_k, n), torch.rand(tokens, top_k)
    a, b = random(rank, n), random(k, rank, few=True)
    inner = torch.einsum("mrk,mk->mr", a[adapter, of_all], gated[at]) * weights.flatten()[known][:, None]
    wanted = torch.einsum("mnr,mr->mn", b[adapter, expert], inner)
    out = kernels.expand(kernels.shrink(gated, blocks, top_k, places, (a,)), blocks, weights, b)
    assert relative_error(out[slot_row.flatten()[known].long()], wanted) < 1e-5
