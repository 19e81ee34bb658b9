"""Ways around Python wrappers, for graphs that are nothing but one partition.

Inductor's generated wrapper is called once with opaque objects instead of tensors, and with a spy
instead of the partition. If the wrapper only hands objects from its arguments to the partition, and
from there to its result, that shows how it orders them. Anything else it does with an opaque object
raises, and then the graph keeps its wrapper.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from pygraph import runtime


@dataclasses.dataclass(frozen=True)
class Route:
    """How a graph's arguments and results map to those of its one partition.

    inputs: partition argument i is graph argument ``inputs[i]``.
    outputs: graph result j is ``(True, k)``: partition result k, or ``(False, k)``: graph argument k.
    """

    inputs: list[int]
    outputs: list[tuple[bool, int]]


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
    """The route through ``runner.call``, or None if it is more than a reordering.

    runner: Inductor's generated Runner, whose one partition returns ``output_count`` objects.
    """
    given = [object() for _ in range(input_count)]
    made = [object() for _ in range(output_count)]
    seen: list[list[object]] = []

    def spy(args: list[object]) -> tuple[object, ...]:
        seen.append(list(args))
        return tuple(made)

    partitions = runner.partitions
    runner.partitions = [spy]
    try:
        results = runner.call(list(given))
    except Exception:
        return None
    finally:
        runner.partitions = partitions
    if len(seen) != 1:
        return None
    position = {id(argument): i for i, argument in enumerate(given)}
    result_of = {id(result): i for i, result in enumerate(made)}
    inputs = [position.get(id(argument)) for argument in seen[0]]
    outputs: list[tuple[bool, int]] = []
    for result in results:
        if id(result) in result_of:
            outputs.append((True, result_of[id(result)]))
        elif id(result) in position:
            outputs.append((False, position[id(result)]))
        else:
            return None
    if any(i is None for i in inputs):
        return None
    return Route([i for i in inputs if i is not None], outputs)
