"""The program's objects and containers in the attributes of a library's classes and modules."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
import torch

from .attacked import Plain, assert_follows, assert_replays_follow


@pytest.mark.parametrize("owner", [torch.nn.Module, torch.nn.Linear, torch.Tensor])
@pytest.mark.parametrize("kind", ["object", "class", "dictionary", "list"])
def test_settings_in_a_librarys_class(
    partitions: Any, monkeypatch: pytest.MonkeyPatch, owner: type, kind: str
) -> None:
    made: dict[str, Any] = {
        "object": Plain(scale=2.0),
        "class": type("Settings", (), {"scale": 2.0}),
        "dictionary": {"scale": 2.0},
        "list": [2.0],
    }
    settings = made[kind]
    monkeypatch.setattr(owner, "settings", settings, raising=False)
    layer: Any = torch.nn.Linear(4, 4)
    key: Any = "scale" if kind == "dictionary" else 0

    def function(x: torch.Tensor) -> torch.Tensor:
        found: Any = (x if owner is torch.Tensor else layer).settings
        return x * (found[key] if kind in ("dictionary", "list") else found.scale)

    def change() -> None:
        if kind in ("dictionary", "list"):
            settings[key] = 3.0
        else:
            settings.scale = 3.0

    assert_replays_follow(partitions, function, change)


def test_an_object_in_a_librarys_module(partitions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is used as a value."""
    settings = Plain(scale=2.0)
    monkeypatch.setattr(torch.nn.utils.rnn, "settings", settings, raising=False)
    module: Any = torch.nn.utils.rnn

    def function(x: torch.Tensor) -> torch.Tensor:
        held = (module,)
        return x * held[0].settings.scale

    assert_replays_follow(partitions, function, lambda: setattr(settings, "scale", 3.0))


@pytest.mark.parametrize("how", ["types.new_class", "make_dataclass"])
def test_a_class_that_pythons_library_has_made(partitions: Any, how: str) -> None:
    options = {"scale": 2.0}
    made: Any
    if how == "types.new_class":
        made = types.new_class("Made", (), {}, lambda scope: scope.update(options=options))
    else:
        made = dataclasses.make_dataclass("Made", [("n", int, 1)], namespace={"options": options})
    config = made()
    change = lambda: options.update(scale=3.0)  # noqa: E731
    assert_replays_follow(partitions, lambda x: x * config.options["scale"], change)


def test_a_class_that_answers_for_its_dictionary(partitions: Any) -> None:
    class Settings:
        def __init__(self) -> None:
            self.scale = 2.0

        def __getattribute__(self, name: str) -> Any:
            found = object.__getattribute__(self, name)
            return dict(found) if name == "__dict__" else found

    settings = Settings()
    assert_replays_follow(
        partitions, lambda x: x * settings.scale, lambda: setattr(settings, "scale", 3.0)
    )


def test_a_class_that_hides_its_dictionary(partitions: Any) -> None:
    """Such callables have no graph."""

    class Settings:
        scale = 2.0

        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            return {}

    settings = Settings()
    assert_follows(partitions, lambda x: x * settings.scale, lambda: setattr(settings, "scale", 3.0))


@pytest.mark.parametrize("part", ["annotation", "text", "deleter", "super"])
def test_small_parts_of_classes(partitions: Any, part: str) -> None:
    numbers = {"scale": 2.0}

    class Holder:
        """2.0"""

        scale: 2.0  # type: ignore[valid-type]

        def __init__(self) -> None:
            self.found: list[float] = []
            self.factor = 2.0

        @property
        def part(self) -> float:
            return 0.0

        @part.deleter
        def part(self) -> None:
            self.found.append(numbers["scale"])

    Holder.__annotations__["scale"] = 2.0
    holder = Holder()
    above = super(Holder, holder)

    def by_deleter(x: torch.Tensor) -> torch.Tensor:
        del holder.part
        return x * holder.found.pop()

    functions: dict[str, Any] = {
        "annotation": lambda x: x * Holder.__annotations__["scale"],
        "text": lambda x: x * float(Holder.__doc__ or "0"),
        "deleter": by_deleter,
        "super": lambda x: x * above.__self__.factor,
    }
    changes: dict[str, Any] = {
        "annotation": lambda: Holder.__annotations__.update(scale=3.0),
        "text": lambda: setattr(Holder, "__doc__", "3.0"),
        "deleter": lambda: numbers.update(scale=3.0),
        "super": lambda: setattr(holder, "factor", 3.0),
    }
    assert_replays_follow(partitions, functions[part], changes[part])


@pytest.mark.parametrize("what", ["mode", "parameter"])
def test_a_module_behind_an_interpreter(partitions: Any, what: str) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4))
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
            module.weight = torch.nn.Parameter(torch.full((4,), 2.0))

    assert_follows(partitions, function, change)
    del old
