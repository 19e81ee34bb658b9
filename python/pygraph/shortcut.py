"""Ways around Python wrappers, for graphs that are nothing but one partition.

Inductor's generated wrapper is called once with opaque objects instead of tensors, and with spies
instead of the partition and of the function that makes views. If the wrapper only hands objects from
its arguments to the partition, and from there, or views of them, to its result, that shows how it
orders them. Anything else it does with an opaque object raises, and then the graph keeps its wrapper.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import torch

from pygraph import runtime

# Size and strides, in elements, and offset from the first element of the tensor that is viewed.
View = tuple[list[int], list[int], int]
Output = tuple[bool, int, View | None]


@dataclasses.dataclass(frozen=True)
class Route:
    """How a graph's arguments and results map to those of its one partition.

    inputs: partition argument i is graph argument ``inputs[i]``.
    outputs: graph result j is ``(True, k, view)``: partition result k, or ``(False, k, view)``: graph
    argument k; itself if the view is None. Or the result is None (of inputs without a gradient).
    """

    inputs: list[int]
    outputs: list[Output | None]


@dataclasses.dataclass(frozen=True)
class Shortcut:
    """From the arguments of a compiled function straight to its one partition."""

    partition: Any  # pygraph._engine.GraphedCallable
    input_count: int
    route: Route

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A callable that replays if it can and calls ``function`` otherwise."""
        return runtime.engine().whole_graph_callable(  # type: ignore[no-any-return]
            self.partition,
            function,
            False,  # called with the arguments one by one
            self.input_count,
            self.route.inputs,
            self.route.outputs,
        )


def is_plain_inference(input_count: int) -> bool:
    """Whether AOTAutograd's wrappers have nothing to do around the inference graph being compiled.

    That is: no input is mutated, no output aliases, no duplicate or subclassed arguments, no effect
    tokens, no random offsets handed through.
    """
    context = torch._guards.TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is None:
        return False
    return (
        len(metadata.input_info) == input_count
        and not any(info.mutates_data or info.mutates_metadata for info in metadata.input_info)
        and metadata.num_mutated_inp_runtime_indices == 0
        and metadata.num_outputs_aliased == 0
        and metadata.num_intermediate_bases == 0
        and metadata.num_outputs_rng_offset == 0
        and not metadata.tokens
        and not metadata.dynamic_outputs
        and metadata.grad_enabled_mutation is None
        and all(type(meta).__name__ == "PlainTensorMeta" for meta in metadata.subclass_inp_meta)
    )


def find_route(runner: Any, input_count: int, output_count: int) -> Route | None:
    """The route through ``runner.call``, or None if it is more than a reordering and views.

    runner: Inductor's generated Runner, whose one partition returns ``output_count`` objects.
    """
    given = [object() for _ in range(input_count)]
    made = [object() for _ in range(output_count)]
    seen: list[list[object]] = []
    views: dict[int, tuple[object, View]] = {}  # by identity, as results can be anything
    alive: list[object] = []

    def partition(args: list[object]) -> tuple[object, ...]:
        seen.append(list(args))
        return tuple(made)

    def reinterpret_tensor(base: object, size: Any, stride: Any, offset: int = 0) -> object:
        alive.append(object())
        views[id(alive[-1])] = (base, (list(size), list(stride), offset))
        return alive[-1]

    try:
        # A copy of the function: nothing changes for whoever runs the original meanwhile.
        call = runner.call.__func__
        names = {**call.__globals__, "reinterpret_tensor": reinterpret_tensor}
        probe = types.FunctionType(call.__code__, names, closure=call.__closure__)
        results = probe(types.SimpleNamespace(partitions=[partition]), list(given))
    except Exception:
        return None
    if len(seen) != 1:
        return None
    position = {id(argument): i for i, argument in enumerate(given)}
    inputs = [position.get(id(argument)) for argument in seen[0]]
    sources = {id(argument): (False, i) for i, argument in enumerate(given)}
    sources |= {id(result): (True, i) for i, result in enumerate(made)}
    outputs: list[Output | None] = []
    for result in results:
        base, view = views.get(id(result), (result, None))
        if result is None:
            outputs.append(None)
        elif id(base) in sources and _is_fixed(view):
            outputs.append((*sources[id(base)], view))
        else:
            return None
    if any(i is None for i in inputs):
        return None
    return Route([i for i in inputs if i is not None], outputs)


def _is_fixed(view: View | None) -> bool:
    """Whether a view is the same at every call: opaque objects among its sizes are arguments."""
    return view is None or all(type(n) is int for n in (*view[0], *view[1], view[2]))
