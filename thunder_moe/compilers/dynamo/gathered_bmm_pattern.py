"""Finds batched products of rows with the weights of each row's expert, as transformers' "batched_mm" makes them.
Called by rewrite.py; calls sites.py, expert_ids.py, and effects.py for the operations between the products.

    y = bmm(gate_up[ids], rows.unsqueeze(-1)).squeeze(-1)      gate_up (E, N, K), rows (S, K), ids (S,)
    z = bmm(down[ids], (silu(gate) * up).unsqueeze(-1)).squeeze(-1), [gate | up] = y

A weight (E, K, N) likewise, bmm(rows.unsqueeze(1), weight[ids]).squeeze(1). generate() puts this in the place of
"grouped_mm" while it decodes on a GPU: it copies an expert's weights for each of its rows.
Legend: S rows, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from thunder_moe.compilers.dynamo.effects import is_in_a_function_transform, storages_of
from thunder_moe.compilers.dynamo.expert_ids import reason_against_ids
from thunder_moe.compilers.dynamo.nodes import calls, given, value_of
from thunder_moe.compilers.dynamo.scopes import Scope
from thunder_moe.compilers.dynamo.sites import Site, Weights, find_swiglu, site_of
from thunder_moe.compilers.swiglu import SwiGLU


@dataclass(frozen=True, eq=False)
class GatheredBmmSite(Site):
    """A batched product with the gathered weights of each row's expert; `node` is its result (S, N)."""

    ids: Any = None  # node of the experts of its rows (S,)
    nodes: frozenset[fx.Node] = frozenset()  # all nodes that it consists of

    @property
    def operands(self) -> tuple[Any, Any, Any]:
        """Return the current nodes of (rows, the selected weights, ids)."""
        first, second = given(given(self.node)["input"]).values()
        rows, selected = (first, second) if calls(first, "unsqueeze") else (second, first)
        return given(rows)["input"], selected, given(selected)["index"]


def find_gathered_bmm(
    scope: Scope, weights: Weights
) -> tuple[list[SwiGLU], list[GatheredBmmSite], list[GatheredBmmSite]]:
    """Return (SwiGLUs between two products to rewrite, other products to rewrite, all products) of dynamo's graph."""
    sites = [site for node in scope.graph.nodes if (site := _site(node, scope, weights)) is not None]
    eligible = {site.node: site for site in sites if site.reason is None}
    blocks: list[SwiGLU] = []
    for swiglu in find_swiglu(scope, eligible.values()):
        first = swiglu.sites[0]
        second = next((site for site in eligible.values() if site.operands[0] is swiglu.product), None)
        if swiglu.reason or len(swiglu.sites) > 1 or second is None or not isinstance(first, GatheredBmmSite):
            continue
        (unsqueezed,) = (node for node in second.nodes if calls(node, "unsqueeze"))
        whole = set(swiglu.product.users) == {unsqueezed} and second.ids is first.ids
        if whole and _change(scope, (first, second), swiglu.product) is None:
            blocks.append(replace(swiglu, down=second))
    fused = {site for block in blocks for site in (*block.sites, block.down)}
    return blocks, [site for site in eligible.values() if site not in fused], sites


def _site(node: fx.Node, scope: Scope, weights: Weights) -> GatheredBmmSite | None:
    product: Any = given(node)["input"] if calls(node, "squeeze") else None
    if not calls(product, "bmm") or set(product.users) != {node}:
        return None
    first, second = given(product).values()
    for selected, row, dim in ((first, second, 2), (second, first, 1)):
        if not calls(selected, "getitem") or not isinstance(given(selected)["index"], fx.Node):
            continue
        # rows (S, K, 1) behind the weights, or (S, 1, K) before them
        dims = [given(each).get("dim") for each in (row, node)]
        if not calls(row, "unsqueeze") or not all(each in (dim, dim - 3) for each in dims):
            continue
        source, ids = given(selected).values()
        weight, rows, of_rows = value_of(source), value_of(given(row)["input"]), value_of(ids)
        if not all(isinstance(value, Tensor) for value in (weight, rows, of_rows)) or of_rows.ndim != 1:
            continue
        if weight.ndim != 3 or rows.ndim != 2 or is_in_a_function_transform(weight):
            continue
        if weights.behind(scope, source, weight)[0] is None:
            continue
        mat_b = weight if dim == 1 else weight.mT
        found = site_of(node, scope, source, mat_b, rows, weights)
        site = GatheredBmmSite(**vars(found), ids=ids, nodes=frozenset({selected, row, product, node}))
        reason = site.reason or reason_against_ids(scope, ids, selected, site.gemm.experts) or _change(scope, (site,))
        return replace(site, reason=reason)
    return None


def _change(scope: Scope, sites: tuple[GatheredBmmSite, ...], *between: fx.Node) -> str | None:
    """Return why grouped GEMMs at the last of some products may not replace them all."""
    nodes = frozenset().union(*(site.nodes for site in sites)) | {*between}
    rows, selected, ids = sites[0].operands
    # A bias may change a view of the result in place, after the last product. `decline_reason` checks the weight.
    weight = storages_of(value_of(given(selected)["input"]))
    return scope.reason_against_fusing(nodes, sites[-1].node, {"the rows": rows, "the experts": ids}, ignored=weight)
