"""Which operations of a post-grad graph fit in CUDA graphs, and why the others do not.

Follows Inductor's own rules for cutting a program (``Scheduler.should_partition``), one level above it,
where the user's lines are known. Operations are counted, not kernels: Inductor fuses many of them.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable

import torch
from torch import fx

from pygraph.fx_passes.fx_nodes import is_device_copy, is_on_gpu, source_line, tensors_of
from pygraph.observations import Cut
from pygraph.operators import READING_CPU, WAITING, is_collective
from pygraph.uncapturable import reason_of

aten = torch.ops.aten


class Kind(enum.Enum):
    NOTHING = "nothing"  # costs no kernel: a view, a number, an input
    GRAPH = "graph"  # GPU work that can be captured
    GAP = "gap"  # must run outside of graphs


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive operations inside one graph, or in one gap between graphs."""

    kind: Kind
    operations: int
    gpu_operations: int
    names: tuple[str, ...]  # of the first few operations
    inputs: int  # values on the GPU that come from outside of it, and go there
    outputs: int


_ITEM = {aten._local_scalar_dense.default, aten.item.default}
_REMEDIES = {
    "branch": "a branch with few pure operations is computed on both sides; larger ones stay",
    "item": "keep the value on the GPU: compare and select with torch.where instead of .item()",
    "shape": "use an operation with a fixed result: torch.where, or a mask instead of an index list",
    "to_cpu": "return the value on the GPU, or copy it after the compiled function",
    "to_gpu": "create the tensor on the GPU, or move it once, outside of the compiled function",
    "waits": "an algorithm that does not look at its own results on the CPU",
    "refused": "an operator that neither waits for the GPU nor copies from it or to it",
    "ranks": "nothing is needed: what lies between is in graphs",
    "cpu": "move the tensors it works on to the GPU",
    "copy": "keep the tensor on the GPU: model.register_buffer, or x.to(device) before the call",
}


def classify(node: fx.Node) -> tuple[Kind, Cut | None]:
    """Whether a node can be in a graph; a Cut with the reason if not."""
    if node.op != "call_function":
        return Kind.NOTHING, None
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        if target is torch.ops.higher_order.cond or target is torch.ops.higher_order.while_loop:
            return _gap(node, f"the program branches on data ({target})", "branch")
        return (Kind.GRAPH, None) if is_on_gpu(node) else (Kind.NOTHING, None)
    if not isinstance(target, torch._ops.OpOverload):
        return Kind.NOTHING, None
    name = target._schema.name
    if name in WAITING and any(map(is_on_gpu, node.all_input_nodes)):
        return _gap(node, f"{name} waits for the GPU", "waits")
    if is_collective(name) and any(map(is_on_gpu, node.all_input_nodes)):
        return _gap(node, f"ranks communicate ({name})", "ranks")
    reason = reason_of(name)
    if reason is not None and any(map(is_on_gpu, node.all_input_nodes)):
        return _gap(node, f"{name} cannot be captured ({reason})", "refused")
    if name in READING_CPU:
        noun = "a tensor is" if name == "pygraph::to_device" else "numbers are"
        return _gap(node, f"{noun} copied from the CPU before the graph", "copy")
    if name == "pygraph::keep_on_cpu":
        return Kind.GAP, None
    if target in _ITEM:
        return _gap(node, "a number is read back from the GPU (.item())", "item")
    if node.meta.get("unbacked_bindings"):
        return _gap(node, f"the shape of {name} depends on data", "shape")
    if is_device_copy(node, "cpu"):
        return _gap(node, "a copy from the GPU to the CPU", "to_cpu")
    if is_device_copy(node, "cuda"):
        return _gap(node, "a copy from the CPU to the GPU", "to_gpu")
    if target.is_view or not tensors_of(node):
        return Kind.NOTHING, None
    if not is_on_gpu(node):
        return _gap(node, f"{name} is computed on the CPU", "cpu")
    return Kind.GRAPH, None


def segments(graph: fx.Graph) -> list[Segment]:
    """The program as graphs and gaps, in an order with few changes between them.

    Each turn runs all that is ready and can be captured, then all that is ready and cannot, or the
    other way round; the compiler's scheduler does the same.
    """
    return min((_schedule(graph, first) for first in (Kind.GAP, Kind.GRAPH)), key=len)


def _schedule(graph: fx.Graph, turn: Kind) -> list[Segment]:
    waiting = {node: len(node.all_input_nodes) for node in graph.nodes}
    ready = [node for node, count in waiting.items() if count == 0]
    result: list[Segment] = []
    while ready:
        taken: list[fx.Node] = []
        progressed = True
        while progressed:
            progressed = False
            for node in list(ready):
                kind, _ = classify(node)
                if kind not in (turn, Kind.NOTHING):
                    continue
                ready.remove(node)
                progressed = True
                if kind is turn:
                    taken.append(node)
                for user in node.users:
                    waiting[user] -= 1
                    if waiting[user] == 0:
                        ready.append(user)
        if taken:
            result.append(_segment(turn, taken))
        turn = Kind.GAP if turn is Kind.GRAPH else Kind.GRAPH
    return result


def _segment(kind: Kind, nodes: list[fx.Node]) -> Segment:
    inside = set(nodes)
    needed = set().union(*(_behind_views(node, lambda n: n.all_input_nodes) for node in nodes))
    wanted = [node for node in nodes if not _behind_views(node, lambda n: n.users) <= inside]
    return Segment(
        kind=kind,
        operations=len(nodes),
        gpu_operations=sum(is_on_gpu(node) for node in nodes),
        names=tuple(str(node.target).removesuffix(".default") for node in nodes[:3]),
        inputs=sum(is_on_gpu(source) for source in needed - inside),
        outputs=sum(is_on_gpu(node) for node in wanted),
    )


def _behind_views(node: fx.Node, next_to: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """What is next to a node in one direction; views are looked through."""
    found: set[fx.Node] = set()
    for other in next_to(node):
        is_view = other.op == "call_function" and classify(other)[0] is Kind.NOTHING
        found |= _behind_views(other, next_to) if is_view else {other}
    return found


def cuts(graph: fx.Graph) -> list[Cut]:
    """Every reason for a gap, once per line."""
    found = (classify(node)[1] for node in graph.nodes)
    return list(dict.fromkeys(cut for cut in found if cut is not None))


def _gap(node: fx.Node, reason: str, remedy: str) -> tuple[Kind, Cut]:
    return Kind.GAP, Cut("cut", reason, source_line(node), _REMEDIES[remedy])
