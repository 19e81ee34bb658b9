"""Guards that a patch creates in place of Dynamo.

Dynamo binds each ``Guard`` to the method that will create it before it calls the backend, alone or with
an argument (``functools.partial``). So a patch replaces the method, on the guards of the program that
is being compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch._dynamo.guards import GuardBuilder
from torch._dynamo.output_graph import OutputGraph
from torch._guards import Guard

from pygraph import dynamo_program
from pygraph.torch_patches.state import Attempt

# Makes a guard in its own way; False if Dynamo is to make it.
Make = Callable[[GuardBuilder, Guard], bool]


def make_by(output: OutputGraph, kind: str, make: Make, attempt: Attempt) -> None:
    """Has `make` make the guards of a kind, of those that the program has by now.

    kind: a method of Dynamo's GuardBuilder, by its name. Several patches may have a way to make one
    guard: they are asked in the order in which they were applied.
    """
    if dynamo_program.is_stored(output):
        return
    method = getattr(GuardBuilder, kind)
    for guard in output.guards:
        bound = guard.create_fn
        creation = bound.func if isinstance(bound, functools.partial) else bound
        if creation is method:
            creation = _Creation(method)
            is_partial = isinstance(bound, functools.partial)
            guard.create_fn = functools.partial(creation, **bound.keywords) if is_partial else creation
        if isinstance(creation, _Creation) and creation.dynamos is method:
            creation.makes.append((make, attempt))


class _Creation:
    """Stands for a method of Dynamo's that makes a guard."""

    def __init__(self, dynamos: Any) -> None:
        self.dynamos = dynamos
        self.makes: list[tuple[Make, Attempt]] = []
        self.__dict__.update(vars(dynamos))  # what Dynamo notes on it
        self.__name__ = dynamos.__name__  # by which Dynamo reports guards
        self.__code__ = dynamos.__code__  # and sorts them

    def __call__(self, builder: GuardBuilder, guard: Guard, **bound: Any) -> None:
        if not builder.save_guards and any(
            _makes(make, attempt, builder, guard) for make, attempt in self.makes
        ):
            return
        self.dynamos(builder, guard, **bound)

    def __reduce__(self) -> Any:
        return getattr, (GuardBuilder, self.__name__)


def _makes(make: Make, attempt: Attempt, builder: GuardBuilder, guard: Guard) -> bool:
    if attempt.goes_on:
        with attempt.trying():
            return make(builder, guard)
    return False
