"""CUPTI stays loaded between profiles in a process that makes graphs."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

import pytest
import torch

from pygraph.gpu import profiler

_WRAPS = "pygraph.graph(lambda: None)"
_COMPILES = """
from pygraph.compile import backend
from pygraph import runtime
runtime.unavailable_reason = lambda: None
torch.compile(lambda x: x + 1, backend="pygraph")(torch.ones(2))
"""


def _environment_after(program: str, before: dict[str, str]) -> dict[str, str]:
    names = ", ".join(map(repr, profiler.SETTINGS))
    code = f"import os, torch, pygraph\n{program}\nprint(*(os.environ.get(n, '-') for n in ({names})))"
    kept = {k: v for k, v in os.environ.items() if k not in profiler.SETTINGS}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**kept, **before}, capture_output=True, text=True, check=True
    )
    return dict(zip(profiler.SETTINGS, done.stdout.split(), strict=True))


@pytest.mark.parametrize("program", [_WRAPS, _COMPILES], ids=["pygraph.graph", "torch.compile"])
def test_it_stays_loaded(program: str) -> None:
    assert _environment_after(program, {}) == profiler.SETTINGS


def test_what_the_user_has_set_stays() -> None:
    found = _environment_after(_WRAPS, {"TEARDOWN_CUPTI": "1"})
    assert found["TEARDOWN_CUPTI"] == "1"


def test_an_import_changes_nothing() -> None:
    assert set(_environment_after("", {}).values()) == {"-"}


def test_pytorch_knows_these_variables() -> None:
    source = inspect.getsource(torch.profiler.profiler)
    for name, value in profiler.SETTINGS.items():
        assert f'os.environ["{name}"] = "{value}"' in source
