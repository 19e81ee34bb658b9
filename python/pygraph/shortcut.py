"""Finds graphs that are nothing but one partition, which the engine can then call directly.

Inductor's generated wrapper is called once with opaque objects instead of tensors, and with a spy
instead of the partition. If the wrapper only hands objects from its arguments to the partition, and
from there to its result, that shows how it orders them. Anything else it does with an opaque object
raises, and then the graph keeps its wrapper.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Route:
    """How a graph's arguments and results map to those of its one partition.

    inputs: partition argument i is graph argument ``inputs[i]``.
    outputs: graph result j is ``(True, k)``: partition result k, or ``(False, k)``: graph argument k.
    """

    inputs: list[int]
    outputs: list[tuple[bool, int]]


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
