"""Changes of attributes, which Python 3.13 keeps in the object itself, between two looks at the host's
state (bindings/callables/inline_values.h)."""

from __future__ import annotations

import contextlib
import random
from typing import Any

from pygraph.callables.host.host_state import HostState


class _Plain:
    """Whose attributes Python 3.13 keeps in the object itself, and tells nobody about."""


def _content(of: _Plain) -> list[tuple[str, object]]:
    """Values that are numbers or strings, and other objects themselves, in order."""
    return [(k, id(v) if isinstance(v, list) else repr(v)) for k, v in vars(of).items()]


def _change_one(of: _Plain, draw: random.Random, values: list[Any]) -> None:
    name, value = draw.choice("abcdefgh"), draw.choice(values)
    if value == 1.5:
        value = float("1.5")  # another object
    match draw.randrange(5):
        case 0:
            setattr(of, name, value)
        case 1:
            vars(of)[name] = value
        case 2:
            vars(of).pop(name, None)
        case 3:
            setattr(of, name, vars(of).pop(name, value))  # the last one now
        case _:
            with contextlib.suppress(AttributeError):
                delattr(of, name)


def test_attributes_that_change_in_any_way() -> None:
    held = 0
    for seed in range(150):
        draw = random.Random(seed)
        values: list[Any] = [1, 1.5, "a", None, [], []]
        of = _Plain()
        for name in draw.sample("abcdefgh", draw.randrange(9)):
            setattr(of, name, draw.choice(values))
        before = dict(vars(of))
        state, expected = HostState({"program": of}), _content(of)
        for i in range(20):
            assert state.holds() == (_content(of) == expected), f"seed {seed}, look {i}"
            held += _content(of) == expected
            if draw.random() < 0.4:
                vars(of).clear()
                for name, value in before.items():
                    setattr(of, name, value)
            elif draw.random() < 0.6:
                _change_one(of, draw, values)
    assert 500 < held < 2500
