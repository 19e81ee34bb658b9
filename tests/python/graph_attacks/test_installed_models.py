"""Models and programs that lie in installed packages."""

from __future__ import annotations

import importlib
import runpy
from typing import Any

import pytest
import torch

import pygraph

from .attacked import assert_replays_follow, reasons, replays

_SETTINGS = "CONFIG = {'scale': 2.0}\n"
_MODEL = "from . import settings\n\n\ndef forward(x):\n    return x * settings.CONFIG['scale']\n"
_MODEL = "from . import settings\n\n\ndef forward(x):\n    return x * settings.CONFIG['scale']\n"


def test_an_installed_program_that_is_run_by_m(partitions: Any, install: Any) -> None:
    """`python -m installed_run.train`: its module is named `__main__`."""
    install("installed_run/__init__.py", "")
    install("installed_run/settings.py", _SETTINGS)
    install("installed_run/model.py", _MODEL)
    source = "from .model import forward\n\n\ndef step(x):\n    return forward(x)\n"
    install("installed_run/train.py", source)
    step = runpy.run_module("installed_run.train", run_name="__main__")["step"]
    settings = importlib.import_module("installed_run.settings")
    assert_replays_follow(partitions, step, lambda: settings.CONFIG.update(scale=3.0))


def test_an_object_of_a_class_that_derives_from_an_installed_one(partitions: Any, install: Any) -> None:
    source = (
        "import torch\nCONFIG = {'scale': 2.0}\n\n\nclass Base(torch.nn.Module):\n"
        "    def forward(self, x):\n        return x * CONFIG['scale']\n"
    )
    base = install("installed_base.py", source)("installed_base")

    class Model(base.Base):  # type: ignore[misc, name-defined]
        pass

    assert_replays_follow(partitions, Model(), lambda: base.CONFIG.update(scale=3.0))


_LIBRARY = """
import inspect

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)

    @classmethod
    def from_config(cls, **config):
        {frame}
        return cls(**config)

    def memory(self):
        return sum(p.{memory} for p in self.parameters())

    def forward(self, x):
        return self.linear(x)
"""


@pytest.mark.parametrize("names", ["a frame", "a storage"])
def test_a_model_of_a_library_that_names(partitions: Any, install: Any, names: str) -> None:
    """In a method that the step does not call."""
    frame = "inspect.currentframe()" if names == "a frame" else "pass"
    memory = "untyped_storage().nbytes()" if names == "a storage" else "nbytes"
    module = install("installed_model.py", _LIBRARY.format(frame=frame, memory=memory))(
        "installed_model"
    )
    graphed = pygraph.graph(module.Model())
    with torch.no_grad():
        for _ in range(12):
            graphed(torch.randn(3, 4))
    assert replays(partitions) > 0, reasons()


def test_a_step_keeps_its_graph_when_another_callable_is_graphed(partitions: Any, install: Any) -> None:
    source = _LIBRARY.format(frame="inspect.currentframe()", memory="nbytes")
    module = install("installed_model.py", source)("installed_model")
    model = module.Model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(x: Any) -> Any:
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    graphed = pygraph.graph(step)
    for _ in range(8):
        graphed(torch.randn(3, 4))
    made = replays(partitions)
    assert made > 0
    pygraph.graph(module.Model())(torch.randn(3, 4))
    optimizer.load_state_dict(optimizer.state_dict())  # so what the step reaches is walked again
    for _ in range(12):
        graphed(torch.randn(3, 4))
    assert replays(partitions) > made, reasons()
