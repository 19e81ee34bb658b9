"""Moves CPU results after all GPU work, and keeps them from being moved to the GPU."""

from __future__ import annotations

import torch
from torch import fx

import pygraph.operators  # noqa: F401  registers pygraph::keep_on_cpu
from pygraph.fx_passes.aliases import Memory
from pygraph.fx_passes.fx_nodes import (
    add_call,
    is_device_copy,
    is_on_cpu,
    is_on_gpu,
    is_pure,
    last_placeholder,
    output_of,
    source_line,
    value_of,
)
from pygraph.observations import Applied


def sink_cpu_outputs(graph: fx.Graph) -> list[Applied]:
    """Moves copies to the CPU, and CPU work on them, after the GPU's work.

    Only if no GPU work waits for them, and nothing writes their sources in between.
    """
    output = output_of(graph)
    memory = Memory(graph)
    sinkable: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        on_cpu = is_device_copy(node, "cpu") or (is_pure(node) and is_on_cpu(node))
        users = node.users
        is_last = bool(users) and all(user is output or user in sinkable for user in users)
        if on_cpu and is_last and memory.is_unwritten_after(node.all_input_nodes, node):
            sinkable.add(node)
    last_gpu = max(
        (i for i, node in enumerate(graph.nodes) if node.op == "call_function" and is_on_gpu(node)),
        default=-1,
    )
    applied = []
    for i, node in enumerate(list(graph.nodes)):
        if node in sinkable:
            if i < last_gpu and is_device_copy(node, "cpu"):
                what = "a copy to the CPU comes after all GPU work"
                applied.append(Applied("cpu_outputs", what, source_line(node)))
            output.prepend(node)
    return applied


def keep_cpu_values(graph: fx.Graph) -> None:
    """Keeps CPU values on the CPU that Inductor would move to the GPU though the CPU needs them.

    Inductor's ``ConstructorMoverPass``, which runs next, does so when graph partition is on:
    ``return y, torch.arange(4)`` gives a GPU tensor, and a number or a constant on the CPU that another
    CPU operation uses moves away from it. Numbers get an operator that it cannot move. It takes
    constants whose ``device`` is a ``torch.device``, so they get the name of the device, which
    Inductor's lowerings accept as well. Both are done where a value comes from, so that results which
    share memory, or have a stride of 0, still do.
    """
    output = output_of(graph)
    memory = Memory(graph)
    keep = torch.ops.pygraph.keep_on_cpu.default
    for scalar in graph.find_nodes(op="placeholder"):
        users = [
            user
            for user in scalar.users
            if is_on_cpu(user)
            and is_pure(user)
            and memory.is_unwritten_before([scalar], user)
            and not (memory.is_exposed(scalar) and memory.is_shared(scalar, user))
        ]
        if is_on_cpu(scalar) and value_of(scalar).dim() == 0 and users:
            with graph.inserting_after(last_placeholder(graph)):
                kept = add_call(graph, keep, (scalar,), like=users[0])
            for user in users:
                user.replace_input_with(scalar, kept)
    for node in output.all_input_nodes:
        if is_on_cpu(node) and node.op == "placeholder" and value_of(node).dim() == 0:
            with graph.inserting_before(output):
                output.replace_input_with(node, add_call(graph, keep, (node,), like=node))
    for node in graph.nodes:
        if node.op == "call_function" and is_on_cpu(node) and _is_constructor(node):
            node.kwargs = {**node.kwargs, "device": "cpu"}


def _is_constructor(node: fx.Node) -> bool:
    """Whether the operator makes tensors on a given device. (``prims._make_token`` does not take
    one.)"""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    is_constructor = torch._subclasses.fake_tensor._is_tensor_constructor  # type: ignore[attr-defined]
    has_device = any(argument.name == "device" for argument in node.target._schema.arguments)
    return has_device and bool(is_constructor(node.target))
