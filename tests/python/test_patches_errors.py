"""An error in a patch never reaches the user: PyTorch's own way is taken, and the status says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo import eval_frame

from pygraph import dynamo_program, runtime, torch_patches
from pygraph.torch_patches import (
    attribute_guard,
    class_guard,
    compiled_call,
    method_guard,
    module_flag,
    numbers,
    parameters,
    saved_hooks_guard,
    sources,
    state,
    untraced_call,
)
from pygraph.torch_patches.selection import ALL
from pygraph.torch_patches.table import PATCHES
from tests.python.compiled_programs import Backend, OurBackend, ReducingBackend, X
from tests.python.patched_programs import FITTING, Layer, Model, loads_parameters_at_once

pytestmark = pytest.mark.usefixtures("patched", "fresh_state")


def _fails(*_: Any, **__: Any) -> Any:
    raise KeyError("injected")


def _fails_in_the_middle(self: Any, codegen: Any) -> None:
    codegen(self.model)
    codegen(self.arguments[0].source.base)
    raise KeyError("injected")


HOOKS = (
    *((numbers, "_load_cheaply"), (untraced_call, "apply"), (saved_hooks_guard, "apply")),
    *((saved_hooks_guard, "_make"), (class_guard, "apply"), (class_guard, "_make")),
    *((method_guard, "apply"), (method_guard, "_is_method"), (method_guard, "_keep_apart")),
    *((attribute_guard, "apply"), (attribute_guard, "_is_behind_python")),
    *((parameters, "_runs"), (parameters, "_way_to"), (parameters._Run, "_loader")),
    *((parameters._Run, "_write"), (module_flag, "apply"), (compiled_call, "apply")),
    *((sources, "why_not"), (dynamo_program, "is_stored"), (dynamo_program, "current_with")),
    *((state, "note_used"), (state, "log_once")),
)


@pytest.mark.parametrize(("owner", "name"), HOOKS, ids=lambda value: getattr(value, "__name__", value))
def test_an_error_in_a_change_never_reaches_the_user(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _check_without(owner, name, _fails, monkeypatch)


def test_an_error_without_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def fails(*_: Any) -> Any:
        raise Unprintable

    monkeypatch.setattr(saved_hooks_guard, "_make", fails)
    model = Model()
    assert torch.equal(torch.compile(model, backend=ReducingBackend(True))(X), model(X))
    (failed,) = (row for row in torch_patches.status().patches if row.state == "failed")
    assert (failed.name, failed.reason) == ("saved_hooks_guard", "Unprintable")


def test_half_written_code_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    _check_without(parameters._Run, "_write", _fails_in_the_middle, monkeypatch)


def _is_asked(owner: Any, name: str) -> bool:
    """Whether the compilation of this program, with its guards, comes by there."""
    of_patches = {patch.apply.split(":")[0]: patch.name for patch in PATCHES}
    patch = of_patches.get(getattr(owner, "__name__", ""))
    return name != "_is_behind_python" and (patch is None or patch in FITTING)


def _check_without(owner: Any, name: str, fails: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    notices: list[str] = []
    monkeypatch.setattr(runtime, "notice_once", notices.append)
    backend = ReducingBackend(True, ALL)
    model = Model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fails)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=backend)
        for _ in range(2):
            torch.testing.assert_close(compiled(X), model(X))
        assert backend.graphs == 1
        model.layers[1] = Layer(9.0)
        torch.testing.assert_close(compiled(X), model(X))
    assert bool(notices) or not _is_asked(owner, name)
    assert all("injected" in notice for notice in notices)
    failed = [row for row in torch_patches.status().patches if row.state == "failed"]
    assert all(row.reason == "KeyError: 'injected'" for row in failed)
    torch._dynamo.reset()
    notices.clear()
    torch.testing.assert_close(torch.compile(model, backend=backend)(X), model(X))
    assert not notices
    assert loads_parameters_at_once(Model.forward)


def test_a_function_is_called_as_pytorch_does_if_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    notices: list[str] = []
    monkeypatch.setattr(runtime, "notice_once", notices.append)
    for name in ("_cheaper", "_Callback"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiled_call, name, _fails)
            torch._dynamo.reset()
            model = Model()
            torch.testing.assert_close(torch.compile(model, backend=OurBackend())(X), model(X))
    assert len(notices) >= 2


def test_errors_of_other_backends_attributes_stay_theirs() -> None:
    class Strange(Backend):
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(f"no {name}")

    torch._dynamo.reset()
    compiled = eval_frame.optimize(backend=Strange().__call__)(lambda x: x + 1)
    assert torch.equal(compiled(X), X + 1)
