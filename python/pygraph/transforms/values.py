"""What can be said of a CPU value: is it a constant, is it exact on every device, what does it cost?

Exact are operations whose result has the same bits on every device: views, selections, integer and
boolean arithmetic. Floating-point arithmetic is not: a GPU compiler may fuse a product and a sum.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from pygraph.transforms.rewrite import is_on_cpu, is_pure, value_of

aten = torch.ops.aten

# Select and rearrange elements. None that takes an index: a wrong one raises on the CPU, but ends the
# process on a GPU.
_MOVES = {
    *(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.alias.default),
    *(aten.expand.default, aten.permute.default, aten.t.default, aten.transpose.int),
    *(aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
    *(aten.slice.Tensor, aten.select.int, aten.cat.default, aten.stack.default, aten.flip.default),
    *(aten.clone.default, aten.lift_fresh_copy.default, aten.repeat.default, aten.detach.default),
    aten.where.self,
}
# Exact for integers and booleans.
_INTEGER_ARITHMETIC = {
    *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.neg.default, aten.abs.default),
    *(aten.eq.Tensor, aten.ne.Tensor, aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor),
    *(aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar),
    *(aten.minimum.default, aten.maximum.default, aten.clamp.default),
    *(aten.logical_and.default, aten.logical_or.default, aten.logical_not.default),
    *(aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_not.default),
}
CONSTRUCTORS = {
    *(aten.full.default, aten.zeros.default, aten.ones.default, aten.scalar_tensor.default),
    *(aten.arange.default, aten.arange.start, aten.arange.start_step, torch.ops.prims.iota.default),
    aten.eye.default,
}


def is_constant(value: fx.Node) -> bool:
    """Whether the value depends on no input."""
    return all(
        node.op == "get_attr" or (is_pure(node) and is_on_cpu(node)) for node in ancestors_of([value])
    )


@contextlib.contextmanager
def _as_uncaptured_on_the_cpu() -> Iterator[None]:
    # The graph has casts where autocast put them; it must not add any.
    no_casts = torch.autocast("cpu", enabled=False)
    with torch._subclasses.fake_tensor.unset_fake_temporarily(), torch.no_grad(), no_casts:
        yield


def fold(value: fx.Node) -> torch.Tensor | None:
    """The value of a node that depends on no input, computed as uncaptured on the CPU, or None."""
    owner = value.graph.owning_module
    if not is_constant(value):
        return None
    results: dict[fx.Node, Any] = {}
    with _as_uncaptured_on_the_cpu():
        for node in sorted(ancestors_of([value])):
            if node.op == "get_attr":
                results[node] = getattr(owner, str(node.target), None)
                if type(results[node]) not in (torch.Tensor, torch.nn.Parameter):
                    return None
                continue
            args, kwargs = pytree.tree_map_only(fx.Node, results.get, (node.args, node.kwargs))
            if any(isinstance(leaf, torch.SymInt) for leaf in pytree.tree_leaves((args, kwargs))):
                return None
            results[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return results[value]  # type: ignore[no-any-return]


def is_exact(node: fx.Node) -> bool:
    if not is_pure(node) or not is_on_cpu(node):
        return False
    if node.target in _MOVES:
        return True
    operands = [value_of(a) for a in node.all_input_nodes]
    values: list[Any] = [value_of(node), *operands]
    if node.target is torch.ops.prims.convert_element_type.default:
        # Between floats every device rounds to nearest; from floats to integers they may differ.
        source, result = (v.is_floating_point() for v in (operands[0], values[0]))
        return bool(source == result) or bool(result)
    return node.target in _INTEGER_ARITHMETIC and all(
        not isinstance(v, torch.Tensor) or not (v.is_floating_point() or v.is_complex()) for v in values
    )


def is_exact_constant(node: fx.Node) -> bool:
    """Filled tensors, and ranges of integers; a range of floats is computed, device by device."""
    is_range = "arange" in str(node.target) or "iota" in str(node.target)
    return not is_range or not value_of(node).is_floating_point()


def ancestors_of(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending.extend(node.all_input_nodes)
    return found


def bytes_of(node: fx.Node) -> int:
    value = value_of(node)
    count = value.numel()
    return int(value.element_size() * (count if isinstance(count, int) else 1))


def name_of(node: fx.Node) -> str:
    target = node.target
    return (
        target._schema.name.split("::")[-1] if isinstance(target, torch._ops.OpOverload) else node.name
    )
