"""Guards of modules' classes: made once per class, and they see whatever Dynamo's see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from pygraph.torch_patches import method_guard
from pygraph.torch_patches.selection import ALL
from tests.python.compiled_programs import ReducingBackend
from tests.python.patched_programs import needs
from tests.python.test_guards import trees_checked_at_once


class Aware(nn.Module):
    """Looks at its class, as layers of transformers do."""

    is_doubled = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(self).forward is Aware.forward:
            x = x + 1
        x = self.linear(x)
        return x * 2 if self.is_doubled else x


class Derived(Aware):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) - 5


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Aware() for _ in range(4))
        self.seen: dict[str, Any] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _double(model: Stack, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Aware, "is_doubled", True)


def _replace_method(model: Stack, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Aware, "forward", lambda self, x: x * 3)


def _hide_by_attribute(model: Stack, patch: pytest.MonkeyPatch) -> None:
    model.layers[2].is_doubled = True


def _change_class(model: Stack, patch: pytest.MonkeyPatch) -> None:
    model.layers[1].__class__ = Derived
    model.layers[1].calls = 0  # a change of the class alone is not looked for


CHANGES_OF_A_CLASS = (_double, _replace_method, _hide_by_attribute, _change_class)


@pytest.mark.parametrize("change", CHANGES_OF_A_CLASS)
def test_changes_of_a_class_are_seen(change: Callable[[Stack, pytest.MonkeyPatch], None]) -> None:
    x = torch.arange(12.0).reshape(4, 3)
    for reduces in (False, True):
        torch._dynamo.reset()
        model = Stack()
        compiled = torch.compile(model, backend=ReducingBackend(reduces, ALL))
        before = model(x)
        for _ in range(3):
            torch.testing.assert_close(compiled(x), before)
        with pytest.MonkeyPatch.context() as patch:
            change(model, patch)
            assert not torch.equal(model(x), before)
            for _ in range(3):
                torch.testing.assert_close(compiled(x), model(x))


@needs("class_guard")
def test_modules_that_look_at_their_class_are_checked_at_once() -> None:
    counts = []
    for reduces in (True, False):
        torch._dynamo.reset()
        torch.compile(Stack(), backend=ReducingBackend(reduces, ALL))(torch.ones(4, 3))
        counts.append(trees_checked_at_once(Stack.forward))
    assert counts == [1, 4]  # all layers; without: what is in each of them


class Context:
    depth = 0


CONTEXT = Context()


class WritesElsewhere(Stack):
    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:  # type: ignore[override]
        options["seen"] = True
        CONTEXT.depth += 1
        return super().forward(x) + len(options)


class WritesToItself(Stack):
    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:  # type: ignore[override]
        self.seen["options"] = 1
        return super().forward(x) + len(options)


@needs("class_guard")
@pytest.mark.parametrize(("module", "trees"), [(WritesElsewhere, 1), (WritesToItself, 4)])
def test_what_is_written_elsewhere_does_not_matter(module: type[Stack], trees: int) -> None:
    torch._dynamo.reset()
    model = module()
    compiled = torch.compile(model, backend=ReducingBackend(True, ALL))
    x = torch.ones(4, 3)
    for _ in range(2):
        torch.testing.assert_close(compiled(x, scale=1), model(x, scale=1))
    entries = _debug_get_cache_entry_list(module.forward.__code__)  # type: ignore[attr-defined]
    assert entries
    assert {str(entry.guard_manager).count("tag_safe=(True, True)") for entry in entries} == {trees}


def test_the_name_of_a_functions_keywords() -> None:
    def with_all(a: int, /, b: int, *rest: int, c: int, **others: int) -> None: ...
    def with_keywords(a: int, *, c: int, **others: int) -> None: ...
    def without(a: int, *rest: int, c: int) -> None: ...

    names = [method_guard._keywords_of(f.__code__) for f in (with_all, with_keywords, without)]
    assert names == ["others", "others", ""]
