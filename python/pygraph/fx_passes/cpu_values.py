"""Properties of a CPU value: is it a constant, is it exact on every device, how expensive is it?

*Exact* operations give the same bits on every device: views, selections, integer and boolean
arithmetic. Floating-point arithmetic is not exact, because a GPU compiler may fuse a product and a sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from pygraph.fx_passes.fx_nodes import is_on_cpu, is_pure, value_of

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
FILLED = {aten.full.default, aten.scalar_tensor.default}
CONSTRUCTORS = {
    *(*FILLED, aten.zeros.default, aten.ones.default),
    *(aten.arange.default, aten.arange.start, aten.arange.start_step, torch.ops.prims.iota.default),
    aten.eye.default,
}


def is_constant(value: fx.Node) -> bool:
    """Whether the value depends on no input."""
    return all(
        node.op == "get_attr" or (is_pure(node) and is_on_cpu(node)) for node in ancestors_of([value])
    )


def fold(value: fx.Node) -> torch.Tensor | None:
    """The value of a node that depends on no input, computed on the CPU as in an uncaptured run; or
    None."""
    owner = value.graph.owning_module
    if not is_constant(value):
        return None
    results: dict[fx.Node, Any] = {}
    # The graph has casts where autocast put them; it must not add any.
    no_casts = torch.autocast("cpu", enabled=False)
    with torch._subclasses.fake_tensor.unset_fake_temporarily(), torch.no_grad(), no_casts:
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
    operands = [value_of(a) for a in node.all_input_nodes]
    values: list[Any] = [value_of(node), *operands]
    if node.target in _MOVES:
        condition = node.args[0] if node.target is aten.where.self else None
        moved = [value_of(a) for a in node.all_input_nodes if a is not condition and is_on_cpu(a)]
        return all(is_exact_cast(v.dtype, values[0].dtype) for v in moved)
    if node.target is torch.ops.prims.convert_element_type.default:
        return is_exact_cast(operands[0].dtype, values[0].dtype)
    # Beside a number with a fraction, integers are cast to floating point.
    return (
        node.target in _INTEGER_ARITHMETIC
        and not _has_fraction(node)
        and all(not isinstance(v, torch.Tensor) or v.dtype in _INTEGERS for v in values)
    )


_INTEGERS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_EXACT_FLOATS = {  # formats that hold every number of another one
    torch.float16: {torch.float32, torch.float64},
    torch.bfloat16: {torch.float32, torch.float64},
    torch.float32: {torch.float64},
}


def is_exact_cast(source: torch.dtype, result: torch.dtype) -> bool:
    """Whether a cast gives the same bits on every device.

    Casts to narrower floats may round twice on one device and once on another, and give NaN other
    bits; casts from floats to integers differ for what does not fit.
    """
    if source == result:
        return True
    if source in _INTEGERS:
        return result in _INTEGERS or result in (torch.float32, torch.float64)
    return result in _EXACT_FLOATS.get(source, ())


def is_exact_constant(node: fx.Node) -> bool:
    """Whether a constant has the same bits on every device: ranges of integers and filled tensors do; a
    range of floats is computed differently."""
    if node.target in FILLED:
        return number_of(node) is not None
    if node.target in (aten.zeros.default, aten.ones.default, aten.eye.default):
        return True
    return value_of(node).dtype in _INTEGERS and not _has_fraction(node)


def number_of(node: fx.Node) -> Any:
    """The number that all elements of a filled tensor have, or None if that is known only at run time.

    It is rounded as the tensor's dtype rounds it, because kernels may use the number itself.
    """
    number = node.args[-1]
    if not isinstance(number, (bool, int, float)):
        return None
    try:
        with torch._subclasses.fake_tensor.unset_fake_temporarily():
            return torch.full((), number, dtype=value_of(node).dtype, device="cpu").item()
    except (RuntimeError, TypeError, ValueError, OverflowError):
        return None  # the program raises


def _has_fraction(node: fx.Node) -> bool:
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    numbers = (value_of(leaf) if isinstance(leaf, fx.Node) else leaf for leaf in leaves)
    return any(isinstance(number, (float, complex, torch.SymFloat)) for number in numbers)


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
