"""Partitions with tuples of tensors among their arguments, from an operator with several results
outside of graphs.

The engine takes tensors and numbers only. So calls with tuples of the same lengths go to a partition
that takes the elements of the tuples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from pygraph.partition.signature import PartitionInfo

# By argument: how many elements it has, or None if it is no tuple or list.
Lengths = tuple[int | None, ...]


def lengths_of(args: Sequence[Any]) -> Lengths:
    return tuple(len(arg) if isinstance(arg, (tuple, list)) else None for arg in args)


def unpack(args: list[Any]) -> list[Any]:
    """The arguments with elements in the place of their tuples; ``args`` is empty afterwards."""
    flat: list[Any] = []
    for arg in args:
        flat.extend(arg if isinstance(arg, (tuple, list)) else (arg,))
    args.clear()
    return flat


def unpacked_function(
    function: Callable[[list[Any]], Sequence[Any]], lengths: Lengths
) -> Callable[[list[Any]], Sequence[Any]]:
    """The function for arguments that were unpacked. It consumes its list, as compiled functions do."""

    def packed(flat: list[Any]) -> Sequence[Any]:
        given = iter(flat)
        args = [
            next(given) if length is None else tuple(next(given) for _ in range(length))
            for length in lengths
        ]
        flat.clear()
        return function(args)

    return packed


def unpacked_info(info: PartitionInfo, lengths: Lengths) -> PartitionInfo:
    """The partition's information, with the positions of the unpacked arguments."""
    position: dict[int, int] = {}
    count = 0
    for i, length in enumerate(lengths):
        if length is None:
            position[i] = count
        count += 1 if length is None else length

    def moved(positions: frozenset[int]) -> frozenset[int]:
        return frozenset(position[i] for i in positions if i in position)

    return dataclasses.replace(
        info,
        argument_count=info.argument_count + count - len(lengths),
        static=moved(info.static),
        mutated=moved(info.mutated),
        on_host=moved(info.on_host),
        own=None,
        program=f"{info.program} lengths {lengths}" if info.program else "",
    )
