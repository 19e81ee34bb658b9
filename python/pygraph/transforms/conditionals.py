"""``torch.cond`` with small, pure branches: compute both and choose.

A branch that depends on a value on the GPU makes the CPU wait for it and cuts the graph. Where both
branches only compute (no writes, no random numbers) and are small, computing both is exact and cheaper.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from pygraph.transforms.rewrite import (
    Applied,
    add_call,
    drop_unused,
    is_on_gpu,
    is_pure,
    source_line,
    tensors_of,
    value_of,
)

_MAX_NODES = 32  # in both branches
_MAX_ELEMENTS = 1 << 22  # of any value in them


def inline_conditionals(graph: fx.Graph) -> list[Applied]:
    applied = []
    for node in list(graph.find_nodes(op="call_function", target=torch.ops.higher_order.cond)):
        branches = _branches(node)
        if branches is None or not all(_is_small_and_pure(branch) for branch in branches):
            continue
        predicate, _, _, operands = node.args
        with graph.inserting_before(node):
            chosen, other = (_inline(graph, branch, list(operands), node) for branch in branches)
            if not _same_kind(chosen, other):
                continue
            results = [
                add_call(graph, torch.ops.aten.where.self, (predicate, a, b), like=node)
                for a, b in zip(chosen, other, strict=True)
            ]
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
        what = "both branches of torch.cond are computed"
        applied.append(Applied("conditionals", what, source_line(node)))
    drop_unused(graph)
    return applied


def _branches(node: fx.Node) -> list[fx.GraphModule] | None:
    owner = node.graph.owning_module
    branches = []
    for argument in node.args[1:3]:
        if not isinstance(argument, fx.Node) or argument.op != "get_attr" or owner is None:
            return None
        branches.append(owner.get_submodule(str(argument.target)))
    has_other_users = any(user.target is not operator.getitem for user in node.users)
    predicate = node.args[0]
    if has_other_users or not isinstance(predicate, fx.Node) or not is_on_gpu(predicate):
        return None
    return branches


def _is_small_and_pure(branch: fx.GraphModule) -> bool:
    nodes = [node for node in branch.graph.nodes if node.op not in ("placeholder", "output")]
    return 2 * len(nodes) <= _MAX_NODES and all(
        is_pure(node)
        and all(
            t.device.type == "cuda" and isinstance(t.numel(), int) and t.numel() <= _MAX_ELEMENTS
            for t in tensors_of(node)
        )
        for node in nodes
    )


def _inline(
    graph: fx.Graph, branch: fx.GraphModule, operands: list[Any], like: fx.Node
) -> list[fx.Node]:
    """Copies the branch's nodes to the insertion point; its results."""
    copies: dict[fx.Node, Any] = {}
    for node in branch.graph.nodes:
        if node.op == "placeholder":
            copies[node] = operands[len(copies)]
            continue
        args, kwargs = pytree.tree_map_only(fx.Node, copies.__getitem__, (node.args, node.kwargs))
        if node.op == "output":
            return list(args[0])
        copies[node] = add_call(graph, node.target, args, kwargs, like=like)
    raise ValueError("a branch without an output")


def _same_kind(a: list[Any], b: list[Any]) -> bool:
    def is_same(x: Any, y: Any) -> bool:
        if not isinstance(x, fx.Node) or not isinstance(y, fx.Node):
            return False
        left, right = value_of(x), value_of(y)
        return bool(left.dtype == right.dtype and left.shape == right.shape)

    return len(a) == len(b) and all(is_same(x, y) for x, y in zip(a, b, strict=True))
