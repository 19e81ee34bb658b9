"""Which values of an FX graph share memory, and which nodes write it.

Inductor's post-grad graph is not functional: written inputs get a ``copy_`` at its end, and operators
that it runs in place (``index_put_``, custom operators, Triton kernels) write in its middle. A
transformation may move a read only where no write lies between the old place and the new one, and may
take a copy for its source only where nobody can tell the two apart.

The analysis is conservative. Values share memory if a schema says that a result may alias an
argument, or if their fake tensors share a storage. What PyTorch's own schemas do not describe, such
as operators of other libraries and higher-order operators, is taken to write everything that it is
given and to return parts of it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator

import torch
from torch import fx

from pygraph.fx_passes.fx_nodes import output_of, tensors_of

# Namespaces whose operators do what their schemas say.
_TRUSTED = {"aten", "prims", "pygraph", "inductor", "quantized", "quantized_decomposed", "torchvision"}
_NEVER = 1 << 60


class Memory:
    """The graph as it is when this is constructed, with the nodes that took others' place since."""

    def __init__(self, graph: fx.Graph) -> None:
        self._position = {node: i for i, node in enumerate(graph.nodes)}
        self._parent: dict[fx.Node, fx.Node] = {}
        writes: list[tuple[fx.Node, fx.Node]] = []  # (what is written, by which node)
        by_storage: dict[int, fx.Node] = {}
        for node in graph.nodes:
            aliases, written = _effects_of(node)
            for other in aliases:
                self._join(node, other)
            writes += [(value, node) for value in written]
            for storage in _storages_of(node):
                self._join(node, by_storage.setdefault(storage, node))
        self._first_write: dict[fx.Node, int] = {}
        self._last_write: dict[fx.Node, int] = {}
        for value, node in writes:
            memory, position = self._memory(value), self._position[node]
            self._first_write[memory] = min(position, self._first_write.get(memory, _NEVER))
            self._last_write[memory] = max(position, self._last_write.get(memory, -1))
        self._returned = {self._memory(node) for node in output_of(graph).all_input_nodes}

    def is_unwritten_before(self, values: Iterable[fx.Node], node: fx.Node) -> bool:
        """Whether no node up to and including ``node`` writes any of the values."""
        position = self._position[node]
        return all(self._first_write.get(self._memory(v), _NEVER) > position for v in values)

    def is_unwritten_after(self, values: Iterable[fx.Node], node: fx.Node) -> bool:
        """Whether ``node`` and those after it write none of the values."""
        position = self._position[node]
        return all(self._last_write.get(self._memory(v), -1) < position for v in values)

    def is_written(self, value: fx.Node) -> bool:
        """Whether any node writes the value."""
        return self._memory(value) in self._first_write

    def is_exposed(self, value: fx.Node) -> bool:
        """Whether the value's memory is returned to the caller, or written in the graph."""
        return self._memory(value) in self._returned or self.is_written(value)

    def is_shared(self, a: fx.Node, b: fx.Node) -> bool:
        """Whether the two values may share memory."""
        return self._memory(a) is self._memory(b)

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Notes that ``new`` takes the place of ``old``: what is known of one's memory is of the
        other's."""
        first, second = self._memory(old), self._memory(new)
        if first is second:
            return
        self._parent[first] = second
        for known, best in ((self._first_write, min), (self._last_write, max)):
            values = [known[memory] for memory in (first, second) if memory in known]
            if values:
                known[second] = best(values)
        if first in self._returned:
            self._returned.add(second)

    def _memory(self, node: fx.Node) -> fx.Node:
        while node in self._parent:
            node = self._parent[node]
        return node

    def _join(self, a: fx.Node, b: fx.Node) -> None:
        first, second = self._memory(a), self._memory(b)
        if first is not second:
            self._parent[first] = second


def _effects_of(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The operands that the node's result may share memory with, and those that it may write."""
    target = node.target
    operands = [a for a in node.all_input_nodes if tensors_of(a)]
    if node.op in ("placeholder", "get_attr", "output"):
        return [], []
    if target is operator.getitem:
        return operands, []
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in _TRUSTED:
        return operands, operands
    aliases: list[fx.Node] = []
    written: list[fx.Node] = []
    returned = {
        name for r in target._schema.returns if r.alias_info for name in r.alias_info.before_set
    }
    for i, argument in enumerate(target._schema.arguments):
        info = argument.alias_info
        if info is None:
            continue
        value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        nodes = list(_nodes_in(value))
        if info.is_write:
            written += nodes
        if returned & set(info.before_set):
            aliases += nodes
    return aliases, written


def _nodes_in(value: object) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for element in value:
            yield from _nodes_in(element)


def _storages_of(node: fx.Node) -> Iterator[int]:
    if node.op == "output":
        return
    for tensor in tensors_of(node):
        if tensor.layout is torch.strided:
            yield tensor.untyped_storage()._cdata
