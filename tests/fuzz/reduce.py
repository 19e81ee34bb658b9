"""Makes a failing program smaller, as long as it fails."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator

from .program import Call, Program, is_valid

_PLAIN = {"frees": True, "hints": "exact", "shipped": False, "mode": "plain", "lanes": 1, "away": False}
_PLAIN_COMPILED = {**_PLAIN, "dynamic": None, "grad": "no_grad", "training": "backward"}


def reduce(program: Program, fails: Callable[[Program], bool], seconds: float) -> Program:
    """The smallest program found in that time. ``fails`` is asked of valid programs only."""
    end = time.monotonic() + seconds
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in _candidates(program):
            if time.monotonic() > end:
                return program
            if is_valid(candidate) and fails(candidate):
                program, is_smaller = candidate, True
                break
    return program


def size_of(program: Program) -> int:
    """What reduction makes smaller."""
    calls = sum(1 + len(c.before) + len(c.after) + len(c.reuse) + bool(c.values) for c in program.calls)
    return calls + len(program.statements) + len(program.inputs) + len(program.returns)


def _candidates(program: Program) -> Iterator[Program]:
    """Smaller programs, the much smaller ones first. Some are not valid."""
    yield from _with_fewer_calls(program)
    yield from _with_fewer_statements(program)
    yield from _with_fewer_values(program)
    yield from _plainer(program)


def _with_fewer_calls(program: Program) -> Iterator[Program]:
    count = len(program.calls)
    length = count // 2
    while length:
        for start in range(0, count, length):
            smaller = copy.deepcopy(program)
            del smaller.calls[start : start + length]
            if smaller.calls:
                yield smaller
        length //= 2


def _with_fewer_statements(program: Program) -> Iterator[Program]:
    count = len(program.statements)
    length = count // 2
    while length:
        for start in reversed(range(0, count, length)):
            yield from _without(program, start, min(start + length, count))
        length //= 2
    if program.cuts:
        smaller = copy.deepcopy(program)
        smaller.cuts = []
        yield smaller


def _without(program: Program, start: int, stop: int) -> Iterator[Program]:
    """The program without some statements; other values take the place of theirs."""
    gone = [name for s in program.statements[start:stop] for name in s.outputs]
    kept = {name for s in program.statements[start:stop] for name in s.args} - set(gone)
    for stand_in in ["", *sorted(kept)]:
        smaller = copy.deepcopy(program)
        del smaller.statements[start:stop]
        smaller.cuts = sorted(
            {c if c <= start else max(start, c - (stop - start)) for c in program.cuts} - {0}
        )
        if stand_in:
            for statement in smaller.statements:
                statement.args = [stand_in if name in gone else name for name in statement.args]
            smaller.returns = [stand_in if name in gone else name for name in smaller.returns]
        else:
            smaller.returns = [name for name in smaller.returns if name not in gone]
        if smaller.returns:
            yield smaller


def _with_fewer_values(program: Program) -> Iterator[Program]:
    for i in range(len(program.returns)):
        if len(program.returns) > 1:
            smaller = copy.deepcopy(program)
            del smaller.returns[i]
            yield smaller
    used = {name for s in program.statements for name in s.args} | set(program.returns)
    for i, spec in enumerate(program.inputs):
        if spec.name not in used and len(program.inputs) > 1:
            smaller = copy.deepcopy(program)
            del smaller.inputs[i]
            yield smaller


def _plainer(program: Program) -> Iterator[Program]:
    plain = _PLAIN if program.level == "partition" else _PLAIN_COMPILED
    for name, value in plain.items():
        if program.settings.get(name) != value:
            smaller = copy.deepcopy(program)
            smaller.settings[name] = value
            yield smaller
    for i, spec in enumerate(program.inputs):
        for field, value in (("layout", "plain"), ("values", "normal"), ("is_parameter", False)):
            if getattr(spec, field) != value:
                smaller = copy.deepcopy(program)
                setattr(smaller.inputs[i], field, value)
                yield smaller
    for i, call in enumerate(program.calls):
        for field, value in vars(Call()).items():
            if getattr(call, field) != value:
                smaller = copy.deepcopy(program)
                setattr(smaller.calls[i], field, value)
                yield smaller
