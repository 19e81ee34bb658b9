"""The host's random number generators: Python's, PyTorch's, and NumPy's if loaded.

An observed call that draws leaves them in another state. One that seeds them may not, because the call
before it has left them in the same state. So if a callable may seed, one of its rehearsals, of which
neither results nor effects are used, begins at another state. (Numbers that other threads draw
meanwhile come from that one, too. So this is not done to callables that name nothing that seeds.)
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any

import torch

from pygraph.callables.host.user_code import is_library_file, with_inner
from pygraph.callables.host.walk import Reachable
from pygraph.undoing import Undo

# Parts of the names of what sets a generator's state. (What ``random.setstate`` sets is compared at
# each call, as all of Python's generators that the callable reaches: probes.py.)
_SETTERS = ("seed", "rng_state", "set_state", "bit_generator", "set_determinis")
_READERS = ("initial_seed",)
SEEDS = "it sets the state of a random number generator of the CPU; set it outside"
_OTHER_SEED = 0x5EED_1E55  # of the states that rehearsals begin at


def random_state() -> tuple[Any, ...]:
    """Where they stand, to be compared."""
    return tuple(_comparable(get()) for get, _, _ in _generators())


def may_seed(found: Reachable) -> bool:
    """Whether a callable that reaches this may set a generator's state: by the names of functions, and
    by those that the program's own code uses."""
    codes = [function.__code__ for function in found.functions]
    own = [code for code in codes if not is_library_file(code.co_filename)]
    reached = [*found.builtins, *(code.co_name for code in codes)]
    return any(map(_is_setter, reached)) or any(map(_names_setter, own))


def move(undo: Undo) -> Callable[[], bool]:
    """Moves them to other states. Returns a function that tells whether they were set since then, or
    used."""
    for get, put, other in _generators():
        undo.append(functools.partial(put, get()))
        put(other())
    moved = random_state()
    return lambda: random_state() != moved


def _generators() -> Iterator[tuple[Callable[[], Any], Callable[[Any], object], Callable[[], Any]]]:
    """Functions that get and set the state of each, and that make another one, in the middle of numbers
    that a seed gives."""
    yield random.getstate, random.setstate, _other_of_python
    yield torch.default_generator.get_state, torch.default_generator.set_state, _other_of_torch
    numpy: Any = sys.modules.get("numpy.random")
    if hasattr(numpy, "get_state"):  # else it is being imported
        of = functools.partial
        yield of(_state_of, numpy), of(_put, numpy), of(_other_of_numpy, numpy)


def _other_of_python() -> Any:
    generator = random.Random(_OTHER_SEED)
    generator.random()
    return generator.getstate()


def _other_of_torch() -> torch.Tensor:
    generator = torch.Generator().manual_seed(_OTHER_SEED)
    torch.rand(1, generator=generator)
    return generator.get_state()


def _state_of(numpy: Any) -> tuple[Any, Any]:
    """NumPy's bit generator, which the program may replace, and its state."""
    return _bit_generator_of(numpy), numpy.get_state(legacy=False)


def _put(numpy: Any, state: tuple[Any, Any]) -> None:
    if _bit_generator_of(numpy) is not state[0]:
        numpy.set_bit_generator(state[0])
    numpy.set_state(state[1])


def _other_of_numpy(numpy: Any) -> tuple[Any, Any]:
    own = _bit_generator_of(numpy)
    generator = numpy.RandomState(type(own)(_OTHER_SEED))
    generator.random_sample()
    return own, generator.get_state(legacy=False)


def _bit_generator_of(numpy: Any) -> Any:
    """Before NumPy 1.24 it cannot be replaced."""
    get = getattr(numpy, "get_bit_generator", None)
    return get() if get is not None else numpy.mtrand._rand._bit_generator


def _comparable(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.numpy().tobytes()
    if isinstance(state, dict):
        return {key: _comparable(value) for key, value in state.items()}
    if isinstance(state, tuple):
        return tuple(map(_comparable, state))
    return state.tobytes() if hasattr(state, "tobytes") else state


@functools.lru_cache(maxsize=4096)
def _names_setter(code: CodeType) -> bool:
    for part in with_inner(code):
        names = (*part.co_names, *part.co_varnames, *part.co_freevars, *_texts_in(part.co_consts))
        if any(map(_is_setter, names)):
            return True
    return False


def _texts_in(constants: Iterable[Any]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple):
            yield from _texts_in(constant)


def _is_setter(name: str) -> bool:
    return name not in _READERS and any(setter in name for setter in _SETTERS)
