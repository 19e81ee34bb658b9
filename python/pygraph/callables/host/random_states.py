"""The host's random number generators: Python's, PyTorch's, and NumPy's if loaded.

An observed call that draws leaves them in another state. One that seeds them may not, because the call
before it has left them in the same state. So a rehearsal, whose results the program does not see,
begins at another state if the callable may seed.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch

from pygraph.callables.host.user_code import is_library_file, with_inner
from pygraph.undoing import Undo

# Parts of the names of functions that set a generator's state. (What ``random.setstate`` sets is
# compared at each call, as all of Python's generators that the callable reaches: probes.py.)
_SETTERS = ("seed", "rng_state", "set_state")
_READERS = ("initial_seed",)
SEEDS = "it sets the state of a random number generator of the CPU; set it outside"
_OTHER_SEED = 0x5EED_1E55  # of the states that rehearsals begin at


def random_state() -> tuple[Any, ...]:
    """Where they stand, to be compared."""
    return tuple(_comparable(get()) for get, _, _ in _generators())


def may_seed(functions: Iterable[FunctionType]) -> bool:
    """Whether one of these functions may set a generator's state: by its name, or the names that the
    program's own code uses."""
    codes = [function.__code__ for function in functions]
    own = [code for code in codes if not is_library_file(code.co_filename)]
    return any(_is_setter(code.co_name) for code in codes) or any(map(_names_setter, own))


def move(undo: Undo) -> Callable[[], bool]:
    """Moves them to another state. Returns a function that tells whether they are there still."""
    for get, put, other in _generators():
        undo.append(functools.partial(put, get()))
        put(other)
    moved = random_state()
    return lambda: random_state() == moved


def _generators() -> Iterator[tuple[Callable[[], Any], Callable[[Any], object], Any]]:
    """Functions that get and set the state of each, and another state."""
    yield random.getstate, random.setstate, random.Random(_OTHER_SEED).getstate()
    of_torch = torch.default_generator
    other = torch.Generator().manual_seed(_OTHER_SEED)
    yield of_torch.get_state, of_torch.set_state, other.get_state()
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        yield numpy.get_state, numpy.set_state, numpy.RandomState(_OTHER_SEED).get_state()


def _comparable(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.numpy().tobytes()
    return tuple(part.tobytes() if hasattr(part, "tobytes") else part for part in state)


@functools.lru_cache(maxsize=4096)
def _names_setter(code: CodeType) -> bool:
    for part in with_inner(code):
        texts = [constant for constant in part.co_consts if isinstance(constant, str)]
        if any(map(_is_setter, (*part.co_names, *part.co_freevars, *texts))):
            return True
    return False


def _is_setter(name: str) -> bool:
    return name not in _READERS and any(setter in name for setter in _SETTERS)
