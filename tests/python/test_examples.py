"""The examples run: small, on the CPU, with plain PyTorch in the place of Inductor."""

from __future__ import annotations

import importlib.util
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from .graphed_programs import reason

_EXAMPLES = Path(__file__).parents[2] / "examples" / "python"
_NEEDS = {"hf_inference": "transformers", "hf_generate": "transformers", "timm_training": "timm"}
_MAY_BE_MISSING = {"accelerate_training": "accelerate", "lightning_training": "lightning"}
_STEPS = {"ppo_training": "torch", "vision_training": "torchvision", "lora_training": "transformers"}
_TIME = re.compile(r"^(\w+) +([\d.]+) ms a step", re.MULTILINE)


def _run(name: str, *command: str, backends: tuple[str, ...] = ("none", "eager")) -> str:
    arguments = ["--size", "small", "--backends", *backends, "--first-steps", "1", "--steps", "1"]
    done = subprocess.run(
        [sys.executable, *command, f"{_EXAMPLES / name}.py", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", [*_NEEDS, *_MAY_BE_MISSING])
def test_an_example_prints_times_before_and_after(name: str) -> None:
    pytest.importorskip(_NEEDS.get(name, "torch"))
    output = _run(name)
    library = _MAY_BE_MISSING.get(name)
    if library is not None and importlib.util.find_spec(library) is None:
        assert output == f"{library} is not installed: pip install {library}\n"
        return
    times = _TIME.findall(output)
    assert [backend for backend, _ in times] == ["none", "eager"]
    assert all(float(time) > 0 for _, time in times)


def test_an_example_runs_unchanged_with_pygraph() -> None:
    pytest.importorskip("timm")
    assert len(_TIME.findall(_run("timm_training", "-m", "pygraph", "--summary"))) == 2


@pytest.mark.parametrize("name", _STEPS)
def test_an_example_of_a_step_prints_times_with_a_graph(name: str) -> None:
    pytest.importorskip(_STEPS[name])
    times = _TIME.findall(_run(name, backends=("none", "eager", "graph")))
    assert [backend for backend, _ in times] == ["none", "eager", "graph"]
    assert all(float(time) > 0 for _, time in times)


@pytest.mark.parametrize("name", _STEPS)
def test_the_steps_of_an_example_have_graphs(
    name: str, partitions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every graphed function of it, by partitions that replay on the CPU."""
    pytest.importorskip(_STEPS[name])
    arguments = ["--size", "small", "--backends", "graph", "--first-steps", "4", "--steps", "2"]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    monkeypatch.setattr(sys, "path", [str(_EXAMPLES), *sys.path])
    # Drawn on the CPU, numbers would keep the steps from their graphs.
    monkeypatch.setattr(torch, "randn_like", torch.ones_like)
    monkeypatch.setattr(torch, "multinomial", lambda p, _: p.argmax(-1, keepdim=True))
    monkeypatch.setattr(torch.nn.functional, "dropout", lambda x, *_, **__: x)
    monkeypatch.setattr(torch.nn.Dropout, "forward", lambda _, x: x)
    runpy.run_path(str(_EXAMPLES / f"{name}.py"), run_name="__main__")
    assert partitions.all and all(partition.replays > 3 for partition in partitions.all), reason()
    assert reason() == ""
