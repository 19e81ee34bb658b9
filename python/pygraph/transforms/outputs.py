"""CPU results: computed after all GPU work, and never moved to the GPU behind the user's back."""

from __future__ import annotations

import torch
from torch import fx

import pygraph.ops  # noqa: F401  registers pygraph::keep_on_cpu
from pygraph.transforms.rewrite import (
    Applied,
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


def sink_cpu_outputs(graph: fx.Graph) -> list[Applied]:
    """Moves copies to the CPU, and what the CPU computes of them, behind the GPU's work.

    Only where no GPU work waits for them.
    """
    output = output_of(graph)
    sinkable: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        on_cpu = is_device_copy(node, "cpu") or (is_pure(node) and is_on_cpu(node))
        users = node.users
        if on_cpu and users and all(user is output or user in sinkable for user in users):
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
    """Marks CPU values that Inductor would move to the GPU though the CPU needs them.

    PyTorch 2.11 does so when graph partition is on: ``return y, torch.arange(4)`` gives a GPU tensor,
    and a number on the CPU that another CPU operation uses moves away from it.
    """
    output = output_of(graph)
    for scalar in graph.find_nodes(op="placeholder"):
        users = [user for user in scalar.users if is_on_cpu(user) and is_pure(user)]
        if is_on_cpu(scalar) and value_of(scalar).dim() == 0 and users:
            with graph.inserting_after(last_placeholder(graph)):
                kept = add_call(graph, torch.ops.pygraph.keep_on_cpu.default, (scalar,), like=users[0])
            for user in users:
                user.replace_input_with(scalar, kept)
    movable: set[fx.Node] = set()
    for node in graph.nodes:
        if not is_on_cpu(node):
            continue
        is_constructor = isinstance(node.target, torch._ops.OpOverload) and (
            torch._subclasses.fake_tensor._is_tensor_constructor(node.target)  # type: ignore[attr-defined]
        )
        is_scalar_input = node.op == "placeholder" and value_of(node).dim() == 0
        if is_constructor or is_scalar_input or any(a in movable for a in node.all_input_nodes):
            movable.add(node)
    for node in output.all_input_nodes:
        if node in movable:
            with graph.inserting_before(output):
                kept = add_call(graph, torch.ops.pygraph.keep_on_cpu.default, (node,), like=node)
            output.replace_input_with(node, kept)
