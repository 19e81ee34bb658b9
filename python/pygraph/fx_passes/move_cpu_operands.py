"""CPU values that GPU code uses: put where the GPU finds them, without a cut in the middle.

For every operand on the CPU of an operator on the GPU, and for every copy from the CPU to the GPU,
the value's *GPU version* is made, by the first rule that fits:

    a copy of a GPU value to the CPU     that GPU value; a copy of it, if it is written later
    a constant (arange of integers, ...) the same constant, made on the GPU
    computed from constants alone        computed once, now, on the CPU; kept on the GPU
    an exact operation                   the same operation on the GPU versions of its operands
    anything else                        an asynchronous copy, before the graph where that is possible
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

import pygraph.operators  # noqa: F401  registers pygraph::to_device
from pygraph.fx_passes.aliases import Memory
from pygraph.fx_passes.cpu_values import (
    CONSTRUCTORS,
    FILLED,
    ancestors_of,
    bytes_of,
    fold,
    is_constant,
    is_exact,
    is_exact_cast,
    is_exact_constant,
    name_of,
    number_of,
)
from pygraph.fx_passes.fx_nodes import (
    add_call,
    is_device_copy,
    is_on_cpu,
    is_on_gpu,
    is_pure,
    last_placeholder,
    source_line,
    value_of,
)
from pygraph.observations import Applied

aten = torch.ops.aten

# Operators on the GPU that take CPU tensors of any shape.
_MIXED_DEVICES = {
    *(aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_put.default),
    *(aten._unsafe_index_put.default, aten.copy.default, aten.slice_scatter.default),
}
# Kernels that read these arguments on the host when they are not captured.
_READ_ON_HOST = {"philox_seed", "philox_offset", "rng_state", "unused"}
# A copy may be this much larger than the result that is wanted of it; below, size does not count.
_LARGER_COPY = 4
_SMALL_BYTES = 1 << 16
_LARGEST_FOLDED = 1 << 24


class Placement:
    """Makes GPU versions in one graph; each value has at most one.

    may_hold_constants: whether the graph's module can get tensors as attributes.
    """

    def __init__(
        self, graph: fx.Graph, gpu: torch.device, enabled: frozenset[str], may_hold_constants: bool
    ) -> None:
        self.applied: list[Applied] = []
        self._graph = graph
        self._gpu = gpu
        self._enabled = enabled
        self._may_hold_constants = may_hold_constants
        self._memory = Memory(graph)
        self._versions: dict[fx.Node, fx.Node] = {}
        self._early = self._nodes_before_the_gpu()
        self._copied: list[tuple[fx.Node, fx.Node]] = []  # (CPU value, stand-in for its copy)

    def run(self) -> None:
        for node in list(self._graph.nodes):
            if node.op != "call_function" or not is_on_gpu(node):
                continue
            if is_device_copy(node, "cuda") and is_on_cpu(node.args[0]):
                self._replace_copy(node)
            else:
                self._replace_operands(node)
        self._add_copies()

    def _replace_copy(self, node: fx.Node) -> None:
        source = node.args[0]
        if not isinstance(source, fx.Node) or not self._is_wanted(source, node):
            return
        # The copy has memory of its own, which what it is a copy of does not share: neither a write
        # to the one nor to the other may show in both.
        is_kept = self._memory.is_exposed(node) or not self._memory.is_unwritten_after(
            ancestors_of([source]), node
        )
        dtype = value_of(node).dtype
        convert = torch.ops.prims.convert_element_type.default
        if not is_exact_cast(value_of(source).dtype, dtype):  # on the CPU, as in the program
            with self._graph.inserting_before(node):
                cast = add_call(self._graph, convert, (source, dtype), like=node)
            if source in self._early:
                self._early.add(cast)
            source = cast
        version = self._version(source, node)
        with self._graph.inserting_before(node):
            if dtype != value_of(source).dtype:
                version = add_call(self._graph, convert, (version, dtype), like=node)
            elif is_kept:
                version = add_call(self._graph, aten.clone.default, (version,), like=node)
        self._memory.replace(node, version)
        node.replace_all_uses_with(version)
        self._graph.erase_node(node)

    def _replace_operands(self, node: fx.Node) -> None:
        target = node.target
        if not is_pure(node) or not isinstance(target, torch._ops.OpOverload):
            return
        on_host = {
            operand
            for argument, operand in zip(target._schema.arguments, node.args, strict=False)
            if argument.name in _READ_ON_HOST
        }
        stays = on_host | _masked_values(node)
        for operand in set(node.all_input_nodes) - stays:
            if not is_on_cpu(operand) or not self._is_wanted(operand, node):
                continue
            if value_of(operand).dim() == 0 or target in _MIXED_DEVICES:
                node.replace_input_with(operand, self._version(operand, node))

    def _is_wanted(self, value: fx.Node, user: fx.Node) -> bool:
        """Whether ``user`` can take the value from elsewhere, and the transformations that this needs
        are switched on.

        The value, and what it is computed from, is read at other places then than in the program:
        nothing that the graph has written by then may be among it, and no constant that it writes at
        any time, for the next call.
        """
        ancestors = ancestors_of([value])
        if not self._memory.is_unwritten_before(ancestors, user):
            return False
        if any(node.op == "get_attr" and self._memory.is_written(node) for node in ancestors):
            return False
        if is_constant(value):
            return "constants" in self._enabled
        scalar = value.op == "placeholder" and value_of(value).dim() == 0
        return ("cpu_scalars" if scalar else "cpu_tensors") in self._enabled

    def _version(self, value: fx.Node, user: fx.Node) -> fx.Node:
        """The value's GPU version, placed before ``user``, which needs it."""
        known = self._versions.get(value)
        if known is not None:
            return known
        if is_device_copy(value, "cpu") and value_of(value).dtype == value_of(value.args[0]).dtype:  # type: ignore[arg-type]
            version = self._source_of(value)
            self._note("cpu_tensors", "a copy to the CPU and back is left out", user)
        elif value.target in CONSTRUCTORS and is_exact_constant(value):
            version = self._make_constant(value)
            self._note("constants", f"{name_of(value)} is made on the GPU", value)
        elif (folded := self._fold(value)) is not None:
            version = folded
            self._note("constants", f"{name_of(value)} of constants is computed once", user)
        elif self._is_worth_repeating(value):
            operands = {a: self._version(a, user) for a in value.all_input_nodes if is_on_cpu(a)}
            with self._graph.inserting_after(max([value, *operands.values()])):
                args, kwargs = pytree.tree_map_only(
                    fx.Node, lambda a: operands.get(a, a), (value.args, value.kwargs)
                )
                version = add_call(self._graph, value.target, args, kwargs, like=value)  # type: ignore[arg-type]
        else:
            version = self._copy(value, user)
        self._versions[value] = version
        return version

    def _source_of(self, copy: fx.Node) -> fx.Node:
        """The GPU tensor from which a copy to the CPU was made, with the value that it had then."""
        source = copy.args[0]
        assert isinstance(source, fx.Node)
        if not self._memory.is_written(source):
            return source
        with self._graph.inserting_after(copy):
            return add_call(self._graph, aten.clone.default, (source,), like=copy)

    def _make_constant(self, value: fx.Node) -> fx.Node:
        with self._graph.inserting_after(value):
            kwargs = {**value.kwargs, "device": self._gpu}
            kwargs.pop("pin_memory", None)
            args = value.args
            if value.target in FILLED:
                args = (*args[:-1], number_of(value))
                kwargs["dtype"] = value_of(value).dtype
            return add_call(self._graph, value.target, args, kwargs, like=value)  # type: ignore[arg-type]

    def _fold(self, value: fx.Node) -> fx.Node | None:
        """The value as a constant on the GPU, or None if it depends on inputs or is large."""
        owner = self._graph.owning_module
        result = fold(value) if bytes_of(value) <= _LARGEST_FOLDED else None
        if result is None or owner is None:
            return None
        if result.numel() != 1 and not self._may_hold_constants:
            return None
        with self._graph.inserting_after(value):
            if result.numel() == 1:  # compiled into the kernels that use it
                kwargs = {"dtype": result.dtype, "device": self._gpu}
                with torch._subclasses.fake_tensor.unset_fake_temporarily():
                    args = (list(result.shape), result.item())
                return add_call(self._graph, aten.full.default, args, kwargs, like=value)
            name = f"_pygraph_constant_{value.name}"
            with torch._subclasses.fake_tensor.unset_fake_temporarily():
                kept = result.to(self._gpu) if torch.cuda.is_available() else result
            owner.register_buffer(name, kept, persistent=False)
            constant = self._graph.get_attr(name)
        with value_of(value).fake_mode:
            constant.meta["val"] = torch.empty_strided(
                result.shape, result.stride(), dtype=result.dtype, device=self._gpu
            )
        return constant

    def _is_worth_repeating(self, value: fx.Node) -> bool:
        """Whether the value comes from exact operations on little that must be copied."""
        if not is_exact(value):
            return False
        leaves: set[fx.Node] = set()
        pending = [value]
        while pending:
            node = pending.pop()
            for operand in node.all_input_nodes:
                if not is_on_cpu(operand) or is_device_copy(operand, "cpu"):
                    continue
                if is_exact(operand):
                    pending.append(operand)
                elif operand.target not in CONSTRUCTORS or not is_exact_constant(operand):
                    leaves.add(operand)
        copied = sum(bytes_of(leaf) for leaf in leaves)
        return copied <= max(_SMALL_BYTES, _LARGER_COPY * bytes_of(value))

    def _copy(self, value: fx.Node, user: fx.Node) -> fx.Node:
        """A node that becomes the value's copy. Copies of early values are made all at once."""
        if value.op == "placeholder" and value_of(value).dim() == 0:
            self._note("cpu_scalars", "a number on the CPU goes to the GPU before the graph", user)
        else:
            self._note("cpu_tensors", "a CPU tensor is copied asynchronously before the graph", user)
        with self._graph.inserting_after(value):
            stand_in = add_call(self._graph, aten.alias.default, (value,), like=user)
        with value_of(value).fake_mode:
            stand_in.meta["val"] = torch.empty_like(value_of(value), device=self._gpu)
        if value in self._early:
            self._copied.append((value, stand_in))
            return stand_in
        return self._replace_stand_in(value, stand_in, stand_in)

    def _add_copies(self) -> None:
        """One copy for all early scalars of a dtype, one for each other early value."""
        if not self._copied:
            return
        # What the copied values are computed from depends on no GPU work: it can come first.
        ancestors = ancestors_of(value for value, _ in self._copied)
        anchor = last_placeholder(self._graph)
        for node in list(self._graph.nodes):
            if node in ancestors and node.op != "placeholder":
                anchor.append(node)
                anchor = node
        scalars: dict[torch.dtype, list[tuple[fx.Node, fx.Node]]] = {}
        for value, stand_in in self._copied:
            if value_of(value).dim() == 0:
                scalars.setdefault(value_of(value).dtype, []).append((value, stand_in))
            else:
                anchor = self._replace_stand_in(value, stand_in, anchor)
        for pairs in scalars.values():
            anchor = self._replace_scalars(pairs, anchor)

    def _replace_stand_in(self, value: fx.Node, stand_in: fx.Node, anchor: fx.Node) -> fx.Node:
        with self._graph.inserting_after(anchor):
            args = (value, self._gpu)
            copy = add_call(self._graph, torch.ops.pygraph.to_device.default, args, like=stand_in)
        stand_in.replace_all_uses_with(copy)
        self._graph.erase_node(stand_in)
        return copy

    def _replace_scalars(self, pairs: list[tuple[fx.Node, fx.Node]], anchor: fx.Node) -> fx.Node:
        with self._graph.inserting_after(anchor):
            args = ([value for value, _ in pairs], self._gpu)
            target = torch.ops.pygraph.scalars_to_device.default
            anchor = copies = add_call(self._graph, target, args, like=pairs[0][1])
        for i, (_, stand_in) in enumerate(pairs):
            with self._graph.inserting_after(anchor):
                select = aten.select.int
                anchor = copy = add_call(self._graph, select, (copies, 0, i), like=stand_in)
            stand_in.replace_all_uses_with(copy)
            self._graph.erase_node(stand_in)
        return anchor

    def _nodes_before_the_gpu(self) -> set[fx.Node]:
        """Nodes that can run before all GPU work: nothing on the GPU is among their ancestors."""
        early: set[fx.Node] = set()
        for node in self._graph.nodes:
            is_source = node.op in ("placeholder", "get_attr") and not is_on_gpu(node)
            is_cpu_work = is_pure(node) and not is_on_gpu(node)
            if is_source or (is_cpu_work and all(a in early for a in node.all_input_nodes)):
                early.add(node)
        return early

    def _note(self, transform: str, what: str, node: fx.Node) -> None:
        self.applied.append(Applied(transform, what, source_line(node)))


def _masked_values(node: fx.Node) -> set[Any]:
    """The value of ``x[mask, index] = value``, where a number must stay on the CPU.

    From there it fills; on the GPU it would have to be repeated as often as the mask says. (With one
    mask alone Inductor compiles the assignment to a selection.)
    """
    if node.target not in (aten.index_put.default, aten._unsafe_index_put.default):
        return set()
    indices = [value_of(i) for i in node.args[1] if isinstance(i, fx.Node)]  # type: ignore[union-attr]
    is_masked = any(index.dtype in (torch.bool, torch.uint8) for index in indices)
    return {node.args[2]} if is_masked and len(indices) > 1 else set()
