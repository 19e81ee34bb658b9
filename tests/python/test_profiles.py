"""The engine is told when a profile of the GPU begins and ends (torch_patches/profiles.py)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from torch.autograd import profiler
from torch.profiler import ProfilerActivity

from pygraph import runtime
from pygraph.torch_patches import profiles

_NAMES = ("_prepare_profiler", "_enable_profiler", "_disable_profiler")


class _Engine:
    def __init__(self) -> None:
        self.told: list[str] = []

    def begin_profile(self) -> None:
        self.told.append("begin")

    def end_profile(self, detaches: bool) -> None:
        self.told.append(f"end, {'detaches' if detaches else 'stays'}")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Engine]:
    """PyTorch's functions only note that they were called; they are put back."""
    engine = _Engine()
    monkeypatch.setattr(runtime, "engine", lambda: engine)
    monkeypatch.setenv("TEARDOWN_CUPTI", "")  # so that what is set below is undone
    monkeypatch.delenv("TEARDOWN_CUPTI")
    for name in _NAMES:
        monkeypatch.setattr(profiler, name, lambda *_, name=name, **__: engine.told.append(name))
    profiles.install()
    yield engine


def test_a_profile_of_the_gpu(engine: _Engine) -> None:
    activities = {ProfilerActivity.CPU, ProfilerActivity.CUDA}
    profiler._prepare_profiler(None, activities)  # type: ignore[arg-type]
    profiler._enable_profiler(None, activities)  # type: ignore[arg-type]
    profiler._disable_profiler()
    begin, enable = ["begin", "_prepare_profiler"], ["begin", "_enable_profiler"]
    assert engine.told == [*begin, *enable, "_disable_profiler", "end, detaches"]


def test_cupti_stays_where_the_user_wants_it(engine: _Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEARDOWN_CUPTI", "0")
    profiler._prepare_profiler(None, {ProfilerActivity.CUDA})  # type: ignore[arg-type]
    profiler._disable_profiler()
    assert engine.told[-1] == "end, stays"


def test_an_error_of_pytorchs_ends_the_profile(
    engine: _Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise RuntimeError("no profile")

    for name in _NAMES[:2]:
        getattr(profiler, name)(None, {ProfilerActivity.CUDA})
    monkeypatch.setattr(profiler, "_disable_profiler", fails)
    profiles.install()
    profiler._prepare_profiler(None, {ProfilerActivity.CUDA})  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="no profile"):
        profiler._disable_profiler()
    assert engine.told[-1] == "end, detaches"


def test_a_profile_that_cannot_begin(engine: _Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("CUPTI is in use")

    monkeypatch.setattr(profiler, "_enable_profiler", fails)
    profiles.install()
    with pytest.raises(RuntimeError, match="in use"):
        profiler._enable_profiler(None, {ProfilerActivity.CUDA})  # type: ignore[arg-type]
    assert engine.told == ["begin", "end, detaches"]


def test_other_profiles_are_not_the_engines_concern(engine: _Engine) -> None:
    profiler._prepare_profiler(None, {ProfilerActivity.CPU})  # type: ignore[arg-type]
    profiler._enable_profiler(None, set())  # type: ignore[arg-type]  # as emit_nvtx does
    profiler._disable_profiler()
    assert engine.told == ["_prepare_profiler", "_enable_profiler", "_disable_profiler"]


_PROGRAM = """
import os, torch, pygraph
{program}
x = torch.ones(4)
for _ in range(2):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        x.sin()
    assert "aten::sin" in {{event.name for event in found.events()}}
end = torch.autograd.profiler._disable_profiler
print(os.environ.get("TEARDOWN_CUPTI"), hasattr(end, "__wrapped__"))
"""


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("", "None False"),
        ("pygraph.graph(lambda: None)", "1 True"),
        (
            "from pygraph.compile import backend; from pygraph import runtime\n"
            "runtime.unavailable_reason = lambda: None\n"
            'torch.compile(lambda x: x + 1, backend="pygraph")(torch.ones(2))',
            "1 True",
        ),
    ],
    ids=["an import", "pygraph.graph", "torch.compile"],
)
def test_programs_with_graphs_watch_profiles(
    program: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TEARDOWN_CUPTI", raising=False)
    code = _PROGRAM.format(program=program)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == expected
