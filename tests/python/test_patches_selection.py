"""Which patches a program has: the option, the environment variable, and what they may be."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from pygraph import options
from pygraph.torch_patches import selection
from pygraph.torch_patches.selection import ALL, EXACT, NONE
from pygraph.torch_patches.table import PATCHES
from tests.python.compiled_programs import Backend, ReducingBackend, X
from tests.python.patched_programs import Model, loads_parameters_at_once

EXACT_NAMES = frozenset(patch.name for patch in PATCHES if patch.exact)
ALL_NAMES = frozenset(patch.name for patch in PATCHES)


def _parsed(**asked: object) -> frozenset[str]:
    given = {f"pygraph.{name}": value for name, value in asked.items()}
    return options.parse(None, given).own.patches


@pytest.mark.parametrize(
    ("value", "names"),
    [
        *((NONE, frozenset()), (EXACT, EXACT_NAMES), (ALL, ALL_NAMES)),
        ("saved_hooks_guard", {"saved_hooks_guard"}),
        ("class_guard, compiled_call", {"class_guard", "compiled_call"}),
    ],
)
def test_what_a_value_stands_for(
    value: str, names: frozenset[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _parsed(patches=value) == names
    monkeypatch.setenv("PYGRAPH_PATCHES", value)
    assert _parsed() == names
    assert _parsed(patches=NONE) == frozenset()  # as with the other options, the program's comes first


def test_only_exact_patches_are_on_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYGRAPH_PATCHES", raising=False)
    assert _parsed() == EXACT_NAMES
    assert {"class_guard", "method_guard", "attribute_guard"} == ALL_NAMES - EXACT_NAMES


@pytest.mark.parametrize("value", ["some", "", "exact,class_guard", "class_guard,", None, 1, ["all"]])
def test_other_values_are_refused_with_the_known_names(value: object) -> None:
    known = ", ".join(patch.name for patch in PATCHES)
    with pytest.raises(ValueError, match=rf"'pygraph.patches' takes none, exact, all, .* {known}; got"):
        _parsed(patches=value)


def test_the_variable_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYGRAPH_PATCHES", "sme")
    with pytest.raises(ValueError, match=r"PYGRAPH_PATCHES takes .* parameter_loader, .*; got 'sme'"):
        _parsed()
    compiled = torch.compile(lambda x: x + 1, backend="pygraph")
    with pytest.raises(Exception, match=r"PYGRAPH_PATCHES takes"):
        compiled(X)


def test_each_program_has_the_patches_that_it_asks_for() -> None:
    for names, is_there in (("parameter_loader", True), ("saved_hooks_guard", False), (NONE, False)):
        torch._dynamo.reset()
        model = Model()
        assert torch.equal(torch.compile(model, backend=ReducingBackend(True, names))(X), model(X))
        assert loads_parameters_at_once(Model.forward) == is_there


def test_two_backends_with_different_patches() -> None:
    torch._dynamo.reset()
    models = [Model(), Model()]
    backends = [ReducingBackend(True, ALL), ReducingBackend(True, NONE), Backend()]
    for backend in (*backends, *reversed(backends)):
        for model in models:
            compiled = torch.compile(model, backend=backend)
            for _ in range(2):
                assert torch.equal(compiled(X), model(X))
        torch._dynamo.reset()
        assert torch.equal(compiled(X), model(X))


@pytest.mark.usefixtures("patched")
def test_calls_are_pytorchs_where_nobody_asks_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_ours(**asked: object) -> bool:
        compiled = torch.compile(lambda x: x + 1, backend="pygraph", **asked)  # type: ignore[arg-type]
        return hasattr(compiled, "_pygraph_compiled_call")

    assert is_ours()
    assert not is_ours(options={"pygraph.patches": NONE})
    assert not is_ours(options={"pygraph.patches": "parameter_loader"})
    assert not is_ours(options={"pygraph.patches": "unknown"})  # an error of the compilation
    monkeypatch.setenv("PYGRAPH_PATCHES", NONE)
    assert not is_ours()
    assert is_ours(options={"pygraph.patches": EXACT})
    assert is_ours(options={"pygraph.patches": "compiled_call"})
    assert selection.default() == frozenset()


def test_without_patches_nothing_of_pytorch_is_replaced() -> None:
    code = """
import torch
import pygraph.compile.backend
from pygraph.torch_patches import sources
from pygraph.torch_patches.table import PATCHES
from tests.python.compiled_programs import ReducingBackend
torch.compile(lambda x: x + 1, backend="pygraph")
torch.compile(lambda x: x + 1, backend=ReducingBackend(True, "none"))(torch.ones(2))
sources._digests.cache_clear()  # of before
for patch in PATCHES:
    for name in patch.names if sources.release() in patch.releases else ():
        assert sources.digest(name) == sources.known_digest(name, sources.release()), name
"""
    environment = {**os.environ, "PYGRAPH_PATCHES": NONE, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
