"""Functions that the transformations share: examine FX nodes, add nodes, find the user's source
lines."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from pygraph.observations import is_pytorchs

CPU = torch.device("cpu")


def value_of(node: fx.Node) -> Any:
    """The fake tensor (or tuple of them, or number) that stands for the node's result."""
    return node.meta.get("val")


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(value_of(node)) if isinstance(t, torch.Tensor)]


def is_on_cpu(node: fx.Node) -> bool:
    """Whether the node is one tensor on the CPU."""
    value = value_of(node)
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def is_on_gpu(node: fx.Node) -> bool:
    """Whether the node yields any tensor on a GPU."""
    return any(t.device.type == "cuda" for t in tensors_of(node))


def is_device_copy(node: fx.Node, to: str) -> bool:
    """Whether the node copies a tensor from another type of device to device type ``to``."""
    if node.target is torch.ops.prims.device_put.default:
        device = node.args[1] if len(node.args) > 1 else node.kwargs.get("device")
    elif node.target is torch.ops.aten._to_copy.default:
        device = node.kwargs.get("device")
    else:
        return False
    source = node.args[0]
    if device is None or torch.device(device).type != to or not isinstance(source, fx.Node):  # type: ignore[arg-type]
        return False
    value = value_of(source)
    return isinstance(value, torch.Tensor) and value.device.type != to


def is_pure(node: fx.Node) -> bool:
    """Whether the node is an ATen or prims operator whose only effect is its result.

    An operator without results, such as an assertion, exists for its effect.
    """
    target = node.target
    return (
        node.op == "call_function"
        and isinstance(target, torch._ops.OpOverload)
        and target.namespace in ("aten", "prims")
        and not target._schema.is_mutable
        and bool(target._schema.returns)
        and not any(word in target._schema.name for word in ("assert", "constrain"))
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not node.is_impure()
    )


def gpu_of(graph: fx.Graph) -> torch.device | None:
    """The one GPU that the graph works on, or None if there are none or several."""
    devices = {
        t.device
        for node in graph.nodes
        if node.op in ("placeholder", "call_function", "get_attr")
        for t in tensors_of(node)
        if t.device.type == "cuda"
    }
    return devices.pop() if len(devices) == 1 else None


def fake_mode_of(graph: fx.Graph) -> Any:
    for node in graph.nodes:
        for tensor in tensors_of(node):
            if isinstance(tensor, torch._subclasses.FakeTensor):
                return tensor.fake_mode
    raise ValueError("the graph has no fake tensors: it was not traced by AOTAutograd")


def add_call(
    graph: fx.Graph,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    like: fx.Node,
) -> fx.Node:
    """Adds a call at the graph's insertion point, with its value and ``like``'s source lines."""
    node = graph.call_function(target, args, kwargs or {})
    for key in ("stack_trace", "original_aten", "from_node"):
        if key in like.meta:
            node.meta[key] = like.meta[key]
    fake_args, fake_kwargs = pytree.tree_map_only(fx.Node, value_of, (node.args, node.kwargs))
    with fake_mode_of(graph):
        node.meta["val"] = target(*fake_args, **fake_kwargs)
    return node


def drop_unused(graph: fx.Graph) -> None:
    """Erases pure operators whose results have no users. Other unused nodes may have effects, and
    stay."""
    for node in reversed(list(graph.nodes)):
        if not node.users and (is_pure(node) or node.op == "get_attr"):
            graph.erase_node(node)


def last_placeholder(graph: fx.Graph) -> fx.Node:
    """The node after which all computation comes: the last placeholder, or the graph's root if there is
    none."""
    nodes: list[fx.Node] = list(graph.find_nodes(op="placeholder"))
    return nodes[-1] if nodes else graph._root


def output_of(graph: fx.Graph) -> fx.Node:
    (output,) = graph.find_nodes(op="output")
    assert isinstance(output, fx.Node)
    return output


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def source_line(node: fx.Node) -> str:
    """The user's "file:line" that the node comes from, or empty. Frames of PyTorch are left out."""
    return line_in(node.meta.get("stack_trace") or "")


def line_in(stack_trace: str) -> str:
    """The innermost "file:line" of the user's in a printed stack, or empty."""
    frames = reversed(_FRAME.findall(stack_trace))
    return next((f"{path}:{line}" for path, line in frames if not is_pytorchs(path)), "")
