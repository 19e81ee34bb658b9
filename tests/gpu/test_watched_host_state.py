"""Values on the host that a graphed callable reads, and that change between its calls."""

from __future__ import annotations

import builtins
import dataclasses
import decimal
import importlib
import inspect
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from .watched import assert_follows

_SCALE = {"value": 1.0}
_evaluate = builtins.eval


class _Settings:
    def __init__(self) -> None:
        self.scale = 1.0


def test_a_step_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    source = "CONFIG = {'scale': 1.0}\n\n\ndef step(x):\n    return x * CONFIG['scale']\n"
    (folder / "an_installed_step.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    package = importlib.import_module("an_installed_step")
    try:
        assert_follows(package.step, lambda: package.CONFIG.update(scale=2.0))
    finally:
        sys.modules.pop("an_installed_step", None)


@pytest.mark.parametrize("owner", [torch.nn.Module, torch.nn.Linear, torch.Tensor])
@pytest.mark.parametrize("kind", ["object", "dictionary"])
def test_settings_in_an_attribute_of_a_librarys_class(
    owner: type, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: Any = _Settings() if kind == "object" else {"scale": 1.0}
    monkeypatch.setattr(owner, "settings", settings, raising=False)
    layer: Any = torch.nn.Linear(4, 4)

    def function(x: torch.Tensor) -> torch.Tensor:
        found: Any = (x if owner is torch.Tensor else layer).settings
        return x * (found.scale if kind == "object" else found["scale"])

    def change() -> None:
        if kind == "object":
            settings.scale = 2.0
        else:
            settings["scale"] = 2.0

    assert_follows(function, change)


@pytest.mark.parametrize("how", ["types.new_class", "make_dataclass"])
def test_a_class_that_a_library_has_made(how: str) -> None:
    options = {"scale": 1.0}
    made: Any
    if how == "types.new_class":
        made = types.new_class("Made", (), {}, lambda scope: scope.update(options=options))
    else:
        made = dataclasses.make_dataclass("Made", [("n", int, 1)], namespace={"options": options})
    config = made()
    assert_follows(lambda x: x * config.options["scale"], lambda: options.update(scale=2.0))


def test_a_class_that_answers_for_its_dictionary() -> None:
    class Settings(_Settings):
        def __getattribute__(self, name: str) -> Any:
            found = object.__getattribute__(self, name)
            return dict(found) if name == "__dict__" else found

    settings = Settings()
    assert_follows(lambda x: x * settings.scale, lambda: setattr(settings, "scale", 2.0))


@pytest.mark.parametrize("what", ["mode", "parameter"])
def test_a_graph_module_behind_an_interpreter(what: str) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4, device="cuda"))
            self.drop = torch.nn.Dropout(1.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.drop(x * self.weight)

    module = torch.fx.symbolic_trace(Model()).eval()
    interpreter, old = torch.fx.Interpreter(module), module.weight

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return interpreter.run(x)

    def change() -> None:
        if what == "mode":
            module.train()
        else:
            module.weight = torch.nn.Parameter(torch.full((4,), 2.0, device="cuda"))

    assert_follows(function, change, is_replayed=None)
    del old


@pytest.mark.parametrize("part", ["annotation", "text", "deleter", "super"])
def test_small_parts_of_classes(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_SCALE, "value", 1.0)

    class Holder:
        """1.0"""

        size: int

        def __init__(self) -> None:
            self.found: list[float] = []
            self.factor = 1.0

        @property
        def part(self) -> float:
            return 0.0

        @part.deleter
        def part(self) -> None:
            self.found.append(_SCALE["value"])

    Holder.__annotations__["size"] = 1.0
    holder = Holder()
    above = super(Holder, holder)

    def by_deleter(x: torch.Tensor) -> torch.Tensor:
        del holder.part
        return x * holder.found.pop()

    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "annotation": lambda x: x * float(Holder.__annotations__["size"]),
        "text": lambda x: x * float(Holder.__doc__ or "0"),
        "deleter": by_deleter,
        "super": lambda x: x * above.__self__.factor,  # type: ignore[attr-defined]
    }
    changes: dict[str, Callable[[], Any]] = {
        "annotation": lambda: Holder.__annotations__.update(size=2.0),
        "text": lambda: setattr(Holder, "__doc__", "2.0"),
        "deleter": lambda: _SCALE.update(value=2.0),
        "super": lambda: setattr(holder, "factor", 2.0),
    }
    assert_follows(functions[part], changes[part])


@pytest.mark.parametrize("how", ["__globals__", "frame", "frame that is kept", "alias of eval"])
def test_globals_that_are_read_another_way(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that cannot be watched leave the callable without a graph."""
    monkeypatch.setitem(globals(), "_FACTOR", 1.0)

    def with_a_frame() -> tuple[Any, Callable[[float], None]]:
        scale = 1.0

        def put(value: float) -> None:
            nonlocal scale
            scale = value

        return (lambda: scale, inspect.currentframe()), put

    (_, frame), put = with_a_frame()

    def change() -> None:
        globals()["_FACTOR"] = 2.0
        put(2.0)

    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "__globals__": lambda x: x * test_a_step_of_an_installed_package.__globals__["_FACTOR"],
        "frame": lambda x: x * inspect.currentframe().f_globals["_FACTOR"],  # type: ignore[union-attr]
        "frame that is kept": lambda x: x * frame.f_locals["scale"],
        "alias of eval": lambda x: x * _evaluate("_FACTOR"),
    }
    assert_follows(functions[how], change, is_replayed=None if how == "alias of eval" else False)


def test_the_precision_of_decimal_numbers() -> None:
    with decimal.localcontext() as context:
        assert_follows(
            lambda x: x * float(decimal.Decimal(1) / decimal.Decimal(3)),
            lambda: setattr(context, "prec", 3),
        )
