"""A random program as data: what it computes, how it is called, and the Python source of it.

A program is statements over named values. It is data so that it can be reduced; it runs as source, so
that a reproducer is what was run. The same program has two forms: cut into partitions, each a function
of one argument list that it consumes, as Inductor writes them; and as one function for torch.compile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .layouts import Make, lay_out

# Sizes of inputs may be this name: an integer argument of the program that varies between calls.
SIZE = "s"
GENERATOR = "g0"
UNCAPTURED = "uncaptured"  # the name of the series of calls that needs nothing of PyGraph's


@dataclasses.dataclass
class Input:
    """A tensor argument. shape: integers, and SIZE where that varies. values: see calls.py."""

    name: str
    shape: list[Any]
    dtype: str = "float32"
    layout: str = "plain"
    is_parameter: bool = False
    values: str = "normal"


@dataclasses.dataclass
class Statement:
    """``outputs = template`` with the arguments' names filled in.

    meta: the same for tensors without data, where the template needs values.
    writes: which arguments are written. cut: runs between partitions, because it waits for the GPU.
    chance: the order of its additions is left to chance. fragile: it writes, and does not check whether
    what it writes overlaps what it reads. draws: uses the default generator.
    """

    outputs: list[str]
    template: str
    args: list[str]
    meta: str = ""
    writes: list[int] = dataclasses.field(default_factory=list)
    cut: bool = False
    chance: bool = False
    fragile: bool = False
    draws: bool = False

    def source(self, on_meta: bool = False) -> str:
        text = (self.meta if on_meta and self.meta else self.template).format(*self.args)
        return f"{', '.join(self.outputs)} = {text}" if self.outputs else text


@dataclasses.dataclass
class Call:
    """One call. size: position in the program's sizes. reuse: by input, where its tensor comes from if
    it is not a fresh one. values: for all inputs, or "" for each input's own."""

    size: int = 0
    reuse: dict[str, str] = dataclasses.field(default_factory=dict)
    values: str = ""
    before: list[str] = dataclasses.field(default_factory=list)
    after: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Program:
    """level: "partition" or "compiled". kind: of its partitions. cuts: statements that begin another
    partition. settings: how it is compiled and called; see generate.py."""

    seed: int
    level: str
    kind: str
    inputs: list[Input]
    statements: list[Statement]
    returns: list[str]
    calls: list[Call]
    sizes: list[int] = dataclasses.field(default_factory=lambda: [0])
    cuts: list[int] = dataclasses.field(default_factory=list)
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def varies(self) -> bool:
        return any(SIZE in i.shape for i in self.inputs) or any(SIZE in s.args for s in self.statements)

    @property
    def uses_generator(self) -> bool:
        return any(GENERATOR in s.args for s in self.statements)

    @property
    def has_chance(self) -> bool:
        return any(s.chance for s in self.statements)

    @property
    def draws(self) -> bool:
        return any(s.draws for s in self.statements)

    def argument_names(self) -> list[str]:
        """In the order of the program's arguments: the compiler puts numbers last."""
        names = [i.name for i in self.inputs]
        names += [GENERATOR] if self.uses_generator else []
        return names + ([SIZE] if self.varies else [])


def to_json(program: Program) -> dict[str, Any]:
    return dataclasses.asdict(program)


def from_json(data: dict[str, Any]) -> Program:
    fields = dict(data)
    fields["inputs"] = [Input(**i) for i in data["inputs"]]
    fields["statements"] = [Statement(**s) for s in data["statements"]]
    fields["calls"] = [Call(**c) for c in data["calls"]]
    return Program(**fields)


@dataclasses.dataclass
class Part:
    """Consecutive statements: a partition, or what runs between two of them.

    takes, gives: names of arguments and results. dies: arguments that nobody needs afterwards.
    """

    statements: list[Statement]
    is_between: bool
    takes: list[str] = dataclasses.field(default_factory=list)
    gives: list[str] = dataclasses.field(default_factory=list)
    dies: set[str] = dataclasses.field(default_factory=set)


def parts_of(program: Program) -> list[Part]:
    parts: list[Part] = []
    for number, statement in enumerate(program.statements):
        begins = number in program.cuts or not parts or parts[-1].is_between != statement.cut
        if begins:
            parts.append(Part([], statement.cut))
        parts[-1].statements.append(statement)
    order = {name: i for i, name in enumerate(program.argument_names())}
    needed = set(program.returns)
    for part in reversed(parts):
        made = [name for s in part.statements for name in s.outputs]
        used = _unique(name for s in part.statements for name in s.args)
        part.gives = [name for name in _unique(made) if name in needed]
        outside = [name for name in used if name not in made]
        part.takes = sorted(outside, key=lambda name: (name == SIZE, order.get(name, len(order))))
        part.dies = set(part.takes) - needed
        needed = (needed - set(made)) | set(part.takes)
    return parts


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def partition_source(program: Program) -> str:
    """``part0(args)``, ``part1(args)`` ... and ``run(parts, args)``, which consume their arguments."""
    lines: list[str] = []
    body: list[str] = []
    number = 0
    for part in parts_of(program):
        if part.is_between:
            body += [s.source() for s in part.statements]
        else:
            lines += [f"def part{number}(args):", *_indented(_part_body(program, part)), ""]
            body.append(f"args = [{', '.join(part.takes)}]")
            dead = sorted(part.dies)
            if dead:
                body.append(f"del {', '.join(dead)}")
            results = f"({', '.join(part.gives)},) = " if part.gives else ""
            body.append(f"{results}parts[{number}](args)")
            number += 1
    names = program.argument_names()
    head = [f"({', '.join(names)},) = args", "args.clear()"] if names else []
    lines += ["def run(parts, args):"]
    lines += _indented([*head, *body, f"return [{', '.join(program.returns)}]"])
    return "\n".join(lines) + "\n"


def _part_body(program: Program, part: Part) -> list[str]:
    lines = []
    if part.takes:
        lines += [f"({', '.join(part.takes)},) = args", "args.clear()"]
    last = {name: i for i, s in enumerate(part.statements) for name in (*s.args, *s.outputs)}
    for i, statement in enumerate(part.statements):
        lines.append(statement.source())
        dead = sorted(name for name, use in last.items() if use == i and name not in part.gives)
        if dead and program.settings.get("frees", True):
            lines.append(f"del {', '.join(dead)}")
    return [*lines, f"return ({', '.join(part.gives)},)" if part.gives else "return ()"]


def function_source(program: Program) -> str:
    """``program(a0, a1, ...)``, for torch.compile."""
    body = [s.source() for s in program.statements]
    body.append(f"return [{', '.join(program.returns)}]")
    head = f"def program({', '.join(program.argument_names())}):"
    return "\n".join([head, *_indented(body)]) + "\n"


def _indented(lines: Sequence[str]) -> list[str]:
    return ["    " + line for line in lines]


def namespace(device: str) -> dict[str, Any]:
    """What programs' source refers to."""
    import torch.nn.functional as F

    from . import custom_ops

    return {"torch": torch, "F": F, "ops": custom_ops, "DEVICE": device}


def meta_inputs(program: Program, size: int) -> dict[str, Any]:
    """Arguments without data, of the shapes that one call has."""
    values: dict[str, Any] = {SIZE: size, GENERATOR: None}
    for i in program.inputs:
        values[i.name] = lay_out(i.layout, shape_of(i, size), _empty(getattr(torch, i.dtype)))
    return values


def _empty(dtype: torch.dtype) -> Make:
    return lambda shape: torch.empty(shape, dtype=dtype, device="meta")


def shape_of(spec: Input, size: int) -> list[int]:
    return [size if n == SIZE else n for n in spec.shape]


def is_valid(program: Program) -> bool:
    """Whether every statement fits the values it gets, for every size."""
    for size in program.sizes:
        values = {**namespace("meta"), **meta_inputs(program, size)}
        try:
            for statement in program.statements:
                exec(statement.source(on_meta=True), values)
        except Exception:
            return False
        if any(name not in values for name in program.returns):
            return False
    return bool(program.returns) and bool(program.calls)
