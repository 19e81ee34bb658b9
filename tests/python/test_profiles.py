"""The engine is told when CUPTI is attached for a profile, and detached (torch_patches/profiles.py)."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile

from pygraph import runtime
from pygraph.torch_patches import profiles

_NAMES = ("_prepare_profiler", "_enable_profiler", "_disable_profiler")
_ACTIVITIES = {ProfilerActivity.CPU, ProfilerActivity.CUDA}
_BEGUN = ["begin", "begin"]  # prepared, enabled


class _Engine:
    def __init__(self) -> None:
        self.told: list[str] = []

    def begin_profile(self) -> None:
        self.told.append("begin")

    def end_profile(self, detaches: bool) -> None:
        self.told.append(f"end, {'detaches' if detaches else 'stays'}")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Engine]:
    """PyTorch's functions are put back."""
    engine = _Engine()
    monkeypatch.setattr(runtime, "engine", lambda: engine)
    for name in ("TEARDOWN_CUPTI", "DISABLE_CUPTI_LAZY_REINIT"):
        monkeypatch.setenv(name, "")  # so that what is set below is undone
        monkeypatch.delenv(name)
    for name in _NAMES:
        monkeypatch.setattr(profiler, name, getattr(profiler, name))
    profiles.install()
    yield engine


def _cpu() -> profile:
    """One of the CPU only: PyTorch attaches CUPTI for its calls of CUDA, too."""
    return profile(activities=[ProfilerActivity.CPU])


def _in_another_thread(function: object) -> None:
    thread = threading.Thread(target=function)  # type: ignore[arg-type]
    thread.start()
    thread.join()


def test_a_profile(engine: _Engine) -> None:
    with _cpu():
        assert engine.told == _BEGUN
    assert engine.told == [*_BEGUN, "end, detaches"]


@pytest.mark.parametrize("activities", [{ProfilerActivity.CUDA}, _ACTIVITIES])
def test_a_profile_of_the_gpu_is_told_before_pytorch_begins(
    engine: _Engine, monkeypatch: pytest.MonkeyPatch, activities: set[ProfilerActivity]
) -> None:
    for name in _NAMES[:2]:
        monkeypatch.setattr(profiler, name, lambda *_, name=name: engine.told.append(name))
    profiles.install()
    for name in _NAMES[:2]:
        getattr(profiler, name)(None, activities)
    assert engine.told == ["begin", "_prepare_profiler", "begin", "_enable_profiler"]


def test_a_schedule(engine: _Engine) -> None:
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=2)
    told = []
    with profile(activities=[ProfilerActivity.CPU], schedule=schedule) as found:
        for _ in range(6):
            told.append(len(engine.told))
            found.step()
    assert engine.told == [*_BEGUN, "end, detaches"] * 2
    assert told == [0, 1, 2, 3, 4, 5]


def test_a_schedule_that_is_left_in_its_warm_up(engine: _Engine) -> None:
    with profile(
        activities=[ProfilerActivity.CPU], schedule=torch.profiler.schedule(wait=0, warmup=2, active=1)
    ):
        assert engine.told == ["begin"]
    assert engine.told == [*_BEGUN, "end, detaches"]


@pytest.mark.parametrize("name", ["TEARDOWN_CUPTI", "DISABLE_CUPTI_LAZY_REINIT"])
def test_cupti_stays_where_the_user_wants_it(
    engine: _Engine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "0")
    with _cpu():
        pass
    assert engine.told[-1] == "end, stays"


def test_a_profile_within_another_ends_both(engine: _Engine) -> None:
    """PyTorch cancels the outer one."""
    with contextlib.suppress(RuntimeError), _cpu():  # which the end of the outer one may raise
        with _cpu():
            pass
        assert engine.told == [*_BEGUN, *_BEGUN, "end, detaches"]
    assert engine.told == [*_BEGUN, *_BEGUN, "end, detaches"]


def test_ranges_of_another_profiler_end_no_profile(engine: _Engine) -> None:
    def ranges() -> None:
        with profiler.emit_itt():
            pass

    with _cpu():
        _in_another_thread(ranges)
        assert engine.told == _BEGUN
        with pytest.raises(RuntimeError, match="already enabled"):
            ranges()
        assert engine.told == _BEGUN
    assert engine.told == [*_BEGUN, "end, detaches"]


def test_ranges_of_another_profiler_are_no_profile(engine: _Engine) -> None:
    with profiler.emit_itt():
        pass
    assert engine.told == []


def test_another_thread_cannot_end_a_profile(engine: _Engine) -> None:
    def end() -> None:
        with contextlib.suppress(RuntimeError):  # of 2.11
            profiler._disable_profiler()

    with _cpu():
        _in_another_thread(end)
        assert engine.told == _BEGUN
    assert engine.told[-1] == "end, detaches"


def test_one_of_all_threads(engine: _Engine) -> None:
    everything = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=everything):
        pass
    assert engine.told == [*_BEGUN, "end, detaches"]


@pytest.mark.parametrize("name", _NAMES)
def test_after_an_error_of_pytorchs_cupti_may_be_attached(
    engine: _Engine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no profile")

    with monkeypatch.context() as patched:
        for other in _NAMES:
            patched.setattr(profiler, other, fails if other == name else lambda *_, **__: None)
        profiles.install()
        with pytest.raises(RuntimeError, match="no profile"), profiler.profile(use_kineto=True):
            pass
    assert "begin" in engine.told and "end, detaches" not in engine.told


def test_an_error_of_cudas_does_not_reach_the_program(
    engine: _Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example "operation would make the legacy stream depend on a capturing blocking stream"."""
    calls = []

    def fails() -> bool:
        calls.append(1)
        raise torch.AcceleratorError("operation not permitted")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", fails)
    with _cpu() as found:
        torch.ones(2).sin()
    assert "aten::sin" in {event.name for event in found.events()}
    assert engine.told[-1] == "end, detaches" and calls


_ENGINE = """
from pygraph import runtime
engine = runtime.engine()
engine.end_profile(True)
told = [engine.needs_new_executable()]
engine.begin_profile()
told += [engine.needs_new_executable() for _ in range(100)]
engine.end_profile(False)
told += [engine.needs_new_executable() for _ in range(100)]
assert told == [False] + 200 * [True]
"""


def test_the_engine_replays_new_executables_until_cupti_is_detached() -> None:
    subprocess.run([sys.executable, "-c", _ENGINE], check=True)


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
