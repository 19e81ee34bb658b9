"""Attributes of objects whose ``__getattribute__`` is Python, as configurations of transformers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from pygraph.torch_patches import attribute_guard
from pygraph.torch_patches.selection import ALL
from tests.python.compiled_programs import ReducingBackend


class Settings:
    """Other names for some attributes, and one that depends on another."""

    of_class = 1.0

    def __init__(self) -> None:
        self.other_names = {"width": "size"}
        self.size = 3.0
        self.own = 2.0
        self._depth: float | None = 5.0

    def __getattribute__(self, name: str) -> Any:
        names = super().__getattribute__("__dict__").get("other_names", {})
        if name in names:
            name = names[name]
        return super().__getattribute__(name)

    @property
    def depth(self) -> float | None:
        return self._depth


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + getattr(self.settings, "missing", 0.0)
        x = x * (7.0 if hasattr(self.settings, "own") else 11.0)
        x = x - getattr(self.settings, "width", 0.5)
        x = x / (13.0 if hasattr(self.settings, "depth") else 17.0)
        return x + getattr(self.settings, "of_class", 100.0)


def _add(settings: Settings) -> None:
    settings.missing = 19.0  # type: ignore[attr-defined]


def _delete(settings: Settings) -> None:
    del settings.own


def _delete_what_a_property_reads(settings: Settings) -> None:
    del settings._depth


def _rename(settings: Settings) -> None:
    settings.other_names = {"width": "own"}


def _delete_behind_another_name(settings: Settings) -> None:
    del settings.__dict__["size"]


def _hide_attribute_of_class(settings: Settings) -> None:
    settings.of_class = 23.0


def _change_nothing(settings: Settings) -> None:
    settings.unused = 29.0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "change",
    [
        *(_add, _delete, _delete_what_a_property_reads, _rename, _delete_behind_another_name),
        *(_hide_attribute_of_class, _change_nothing),
    ],
)
def test_changes_are_seen_where_dynamo_sees_them(change: Callable[[Settings], None]) -> None:
    x = torch.arange(4.0)
    graphs = []
    for reduces in (False, True):
        torch._dynamo.reset()
        model, backend = Model(), ReducingBackend(reduces, ALL)
        compiled = torch.compile(model, backend=backend)
        for _ in range(3):
            torch.testing.assert_close(compiled(x), model(x))
        assert backend.graphs == 1
        change(model.settings)
        for _ in range(3):
            torch.testing.assert_close(compiled(x), model(x))
        graphs.append(backend.graphs)
    assert graphs[0] == graphs[1] == (1 if change is _change_nothing else 2)


def test_less_python_runs_while_guards_are_checked() -> None:
    calls = []
    for reduces in (False, True):
        torch._dynamo.reset()
        model, x = Model(), torch.ones(2)
        torch.compile(model, backend=ReducingBackend(reduces, ALL))(x)
        (entry,) = _debug_get_cache_entry_list(Model.forward.__code__)  # type: ignore[attr-defined]
        seen: list[str] = []
        sys.setprofile(lambda frame, event, _, seen=seen: seen.append(frame.f_code.co_name))
        matches = entry.guard_manager.root.check({"self": model, "x": x})
        sys.setprofile(None)
        assert matches
        calls.append(seen.count("__getattribute__"))
    assert calls[1] < calls[0]


def test_only_what_object_finds_too_stands_for_the_attribute() -> None:
    settings = Settings()
    assert attribute_guard._is_behind_python(settings, "own")
    assert attribute_guard._is_behind_python(settings, "missing")
    assert attribute_guard._is_behind_python(settings, "of_class")
    assert not attribute_guard._is_behind_python(settings, "width")  # has another name
    assert not attribute_guard._is_behind_python(Model().settings.own, "real")  # no Python behind it
    del settings._depth
    assert not attribute_guard._is_behind_python(settings, "depth")  # the class has it, and it fails

    class WithoutDictionary:
        __slots__ = ("own",)

        def __getattribute__(self, name: str) -> Any:
            return super().__getattribute__(name)

    assert not attribute_guard._is_behind_python(WithoutDictionary(), "missing")

    class Meta(type):
        def __getattribute__(cls, name: str) -> Any:
            return super().__getattribute__(name)

    class OfMeta(metaclass=Meta):
        own = 1.0

    assert not attribute_guard._is_behind_python(OfMeta, "own")  # for classes, Dynamo traces nothing

    class Lazy(Settings):
        def __getattr__(self, name: str) -> float:
            return 31.0

    assert not attribute_guard._is_behind_python(Lazy(), "own")
