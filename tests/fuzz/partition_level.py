"""Programs as partitions of their own making: everything below the compiler, without compiling.

A partition function of eager operators goes through the same Partition as Inductor's do: watched,
recorded twice, linked, verified, tried, replayed, its memory given away. The other side of the
comparison calls the functions themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .program import Part, Program, meta_inputs, namespace, partition_source, parts_of

Function = Callable[[list[Any]], Sequence[Any]]
# Takes the program, a partition's function, what it is told of it, and the device.
Wrap = Callable[[Program, Function, int, str], Function]


def direct(program: Program, function: Function, number: int, device: str) -> Function:
    """The function itself."""
    return function


def graphed(program: Program, function: Function, number: int, device: str) -> Function:
    """A Partition around the function, told what the compiler would tell it."""
    from pygraph.options import Options
    from pygraph.partition.partition import Partition
    from pygraph.partition.signature import PartitionInfo

    part = [part for part in parts_of(program) if not part.is_between][number]
    parameters = {i.name for i in program.inputs if i.is_parameter}
    written = _written(program, part) if program.settings["hints"] == "exact" else set()
    info = PartitionInfo(
        name=f"{program.kind} part {number}",
        kind=program.kind,  # type: ignore[arg-type]
        device=torch.device(device).index or 0,
        argument_count=len(part.takes),
        counts_numbers=True,
        static=frozenset(i for i, name in enumerate(part.takes) if name in parameters),
        mutated=frozenset(i for i, name in enumerate(part.takes) if name in written),
        saved=tuple(_saved(program, part)) if program.kind == "forward" else (),
        on_host=frozenset(),
    )
    select = "auto" if program.settings["shipped"] else "always"
    options = Options(select=select, lanes=program.settings["lanes"])
    return Partition(function, info, options).callable


def _saved(program: Program, part: Part) -> list[int]:
    return [i for i, name in enumerate(part.gives) if name not in program.returns]


def _written(program: Program, part: Part) -> set[str]:
    """Arguments of the program that the part writes, as the compiler knows them; not what earlier parts
    made."""
    values = {**namespace("meta"), **meta_inputs(program, program.sizes[0])}
    storages = {i.name: values[i.name].untyped_storage()._cdata for i in program.inputs}
    found = set()
    for statement in program.statements:
        exec(statement.source(on_meta=True), values)
        if statement in part.statements:
            for i in statement.writes:
                storage = values[statement.args[i]].untyped_storage()._cdata
                found |= {name for name, own in storages.items() if own == storage}
    return found & set(part.takes)


def make(program: Program, device: str, wrap: Wrap) -> Callable[[list[Any]], list[Any]]:
    """The program as a function of one argument list, which it consumes."""
    values = namespace(device)
    exec(compile(partition_source(program), f"<program {program.seed}>", "exec"), values)
    count = sum(not part.is_between for part in parts_of(program))
    parts = [wrap(program, values[f"part{i}"], i, device) for i in range(count)]

    def run(args: list[Any]) -> list[Any]:
        with torch.no_grad():
            return list(values["run"](parts, args))

    return run
