"""The examples run: small, on the CPU, with plain PyTorch in the place of Inductor."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

_EXAMPLES = Path(__file__).parents[2] / "examples" / "python"
_NEEDS = {"hf_inference": "transformers", "hf_generate": "transformers", "timm_training": "timm"}
_MAY_BE_MISSING = {"accelerate_training": "accelerate", "lightning_training": "lightning"}
_TIME = re.compile(r"^(\w+) +([\d.]+) ms a step", re.MULTILINE)


def _run(name: str, *command: str) -> str:
    arguments = ["--size", "small", "--backends", "none", "eager", "--first-steps", "1", "--steps", "1"]
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
