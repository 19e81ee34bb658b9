"""The tensors of a callable's state, between calls that the engine makes: a change leaves the next call
to Python."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from .test_served_calls import begun, served

pytestmark = pytest.mark.skipif(
    os.environ.get("PYGRAPH_SHORT_CHECKS") == "0", reason="all calls are left to Python"
)


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 4))
        self.register_buffer("buffer", torch.randn(4, 3).t())
        self.register_buffer("count", torch.zeros(()))
        self.plain = torch.ones(12)[:4]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return ((self.weight * x) @ self.buffer.t() * self.count).sum() + self.plain.sum()

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.grad = None
        loss = self(x)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss


def _add_and_remove_hook(module: Any) -> None:
    module.weight.register_hook(lambda gradient: gradient).remove()


def _with_transposed_data(module: Any) -> None:
    module.buffer.data = module.buffer.data.contiguous()


CHANGES: dict[str, Callable[[Any], object]] = {
    "data of a parameter": lambda m: setattr(m.weight, "data", torch.ones(3, 4)),
    "data of a buffer": lambda m: setattr(m.buffer, "data", m.buffer.clone()),
    "layout": _with_transposed_data,
    "set_": lambda m: m.count.set_(torch.ones(())),
    "as_strided_": lambda m: m.buffer.as_strided_((3, 4), (0, 1)),
    "resize_": lambda m: m.plain.resize_(3),
    "offset": lambda m: m.plain.as_strided_((4,), (1,), 2),
    "requires_grad of a parameter": lambda m: m.weight.requires_grad_(False),
    "requires_grad of a buffer": lambda m: m.buffer.requires_grad_(),
    "hook": lambda m: m.weight.register_hook(lambda gradient: 2 * gradient),
    "hook that is gone": _add_and_remove_hook,
    "hook after a gradient": lambda m: m.weight.register_post_accumulate_grad_hook(lambda p: None),
    "another parameter": lambda m: setattr(m, "weight", torch.nn.Parameter(torch.ones(3, 4))),
    "another buffer": lambda m: setattr(m, "buffer", torch.ones(3, 4)),
    "dtype": lambda m: m.double(),
    "negative": lambda m: setattr(m.buffer, "data", torch._neg_view(m.buffer.data)),
    "attribute of a dictionary": lambda m: setattr(m._forward_hooks, "tag", 1),
    "dictionary": lambda m: setattr(m, "_parameters", dict(m._parameters)),
    "no change": lambda m: None,
    "a value": lambda m: m.weight.data.fill_(2),
    "a gradient": lambda m: setattr(m.weight, "grad", torch.ones(3, 4)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_results_are_those_of_the_uncaptured_program(partitions: Any, change: Any) -> None:
    """Also where they raise."""
    torch.manual_seed(0)
    ours, theirs = Module(), Module()
    theirs.load_state_dict(ours.state_dict())
    graphed = begun(ours.step, torch.ones(4))
    for _ in range(8):
        theirs.step(torch.ones(4))
    for module in (ours, theirs):
        change(module)
    for i in range(6):
        x = torch.full((4,), float(i))
        found: list[object] = []
        for call in (graphed, theirs.step):
            try:
                found.append(call(x).detach())
            except RuntimeError as error:
                found.append(str(error))
        assert torch.equal(*found) if isinstance(found[0], torch.Tensor) else found[0] == found[1]
        gradients = [m.weight.grad for m in (ours, theirs)]
        assert (gradients[0] is None) == (gradients[1] is None)
        if gradients[0] is not None:
            assert torch.equal(*gradients)  # type: ignore[arg-type]
        assert all(map(torch.equal, ours.state_dict().values(), theirs.state_dict().values()))


_OF_NO_EFFECT = ("no change", "a value", "a gradient", "hook that is gone")


@pytest.mark.parametrize("name", sorted(CHANGES.keys() - set(_OF_NO_EFFECT)))
def test_a_change_is_left_to_python(partitions: Any, name: str) -> None:
    module = Module()
    graphed = begun(module.step, torch.ones(4))
    graphed(torch.ones(4))
    assert served(graphed) == 1
    CHANGES[name](module)
    with contextlib.suppress(RuntimeError):  # as the uncaptured program
        graphed(torch.ones(4))
    assert served(graphed) == 0


@pytest.mark.parametrize("name", ["no change", "a value"])
def test_what_changes_nothing_is_served(partitions: Any, name: str) -> None:
    module = Module()
    graphed = begun(module.step, torch.ones(4))
    CHANGES[name](module)
    graphed(torch.ones(4))
    assert served(graphed) == 1


def test_a_description_that_autograd_has_made_meanwhile(partitions: Any) -> None:
    """Without a change to anything that counts."""
    module = Module()
    graphed = begun(module.step, torch.ones(4))
    module.buffer.requires_grad_().requires_grad_(False)
    graphed(torch.ones(4))
    assert served(graphed) == 1


def test_nodes_that_accumulate_come_and_go(partitions: Any) -> None:
    """As those that uncaptured steps make. The memory of one that has gone may become another's."""
    module = Module()
    graphed = begun(module.step, torch.ones(4))
    for _ in range(3):
        node: Any = get_gradient_edge(module.weight).node
        graphed(torch.ones(4))
        del node
        graphed(torch.ones(4))
        assert served(graphed) == 2
    for _ in range(5):
        node = get_gradient_edge(module.weight).node
        del node
    node = get_gradient_edge(module.weight).node
    node.register_prehook(lambda gradients: (3 * gradients[0],))
    graphed(torch.ones(4))
    assert served(graphed) == 0
    expected = Module()
    expected.load_state_dict(module.state_dict())
    expected.get_buffer("count").sub_(1)
    expected.step(torch.ones(4))
    gradients = [m.weight.grad for m in (module, expected)]
    assert gradients[0] is not None and gradients[1] is not None
    assert torch.equal(gradients[0], 3 * gradients[1])
