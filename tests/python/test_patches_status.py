"""What became of each patch: for the user, and in one line of the log."""

from __future__ import annotations

import dataclasses
import logging
import threading

import pytest
import torch

import pygraph
from pygraph import runtime, torch_patches
from pygraph.torch_patches import module_flag, sources, state
from pygraph.torch_patches.selection import ALL, EXACT, NONE
from pygraph.torch_patches.table import PATCHES, REQUIRED
from tests.python.compiled_programs import ReducingBackend, X
from tests.python.patched_programs import FITTING, WITH_A_PROGRAM, Model

pytestmark = pytest.mark.usefixtures("fresh_state")


def _states() -> dict[str, str]:
    return {row.name: row.state for row in pygraph.status().patches}


def _active() -> set[str]:
    """Of the patches that the option switches."""
    names = {patch.name for patch in PATCHES}
    return {name for name, is_state in _states().items() if is_state == "active"} & names


def _compile(patches: str) -> None:
    torch._dynamo.reset()
    model = Model()
    assert torch.equal(torch.compile(model, backend=ReducingBackend(True, patches))(X), model(X))


def test_before_anything_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYGRAPH_PATCHES", raising=False)
    rows = {row.name: row for row in pygraph.status().patches}
    assert list(rows) == [patch.name for patch in (*PATCHES, *REQUIRED)]
    assert {row.state for row in rows.values()} == {"off"}
    assert rows["parameter_loader"].reason == "no program has been compiled with it yet"
    assert rows["class_guard"].reason == "not asked for by pygraph.patches"
    assert rows["warm_start"].reason == "no program has needed it yet"
    monkeypatch.setenv("PYGRAPH_PATCHES", NONE)
    rows = {row.name: row for row in pygraph.status().patches}
    assert rows["warm_start"].reason == "not asked for by pygraph.patches"
    assert rows["kernel_barriers"].reason == "no program has needed it yet"


@pytest.mark.parametrize("patches", [NONE, EXACT, ALL])
def test_what_a_program_asked_for_is_active(patches: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYGRAPH_PATCHES", NONE)
    _compile(patches)
    states = _states()
    for patch in WITH_A_PROGRAM:
        wanted = patches == ALL or (patches == EXACT and patch.exact)
        wanted = wanted and patch.name in FITTING
        assert states[patch.name] == ("active" if wanted else "off"), patch.name


def test_two_programs_with_different_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYGRAPH_PATCHES", NONE)
    _compile("parameter_loader")
    _compile("attribute_guard")
    _compile(NONE)
    assert _active() == {"parameter_loader", "attribute_guard"}


def test_one_unknown_source_switches_no_other_patch_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYGRAPH_PATCHES", ALL)
    method = "torch._dynamo.guards.GuardBuilder.AUTOGRAD_SAVED_TENSORS_HOOKS"
    known = sources._digests()
    monkeypatch.setattr(sources, "_digests", lambda: {**known, method: "another"})
    _compile(ALL)
    assert _active() == FITTING - {"saved_hooks_guard"}
    (row,) = (row for row in pygraph.status().patches if row.state == "unknown source")
    assert (row.name, row.reason) == ("saved_hooks_guard", f"{method} has changed")


@pytest.mark.skipif({patch.name for patch in WITH_A_PROGRAM} == FITTING, reason="all fit")
def test_patches_that_are_left_off_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYGRAPH_PATCHES", ALL)
    _compile(ALL)
    for patch, row in zip((*PATCHES, *REQUIRED), pygraph.status().patches, strict=True):
        if patch in WITH_A_PROGRAM and patch.name not in FITTING:
            assert (row.state, row.reason) == ("off", patch.left_off[sources.release()])


def test_it_prints_as_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYGRAPH_PATCHES", NONE)
    _compile("parameter_loader")
    lines = str(pygraph.status()).splitlines()
    assert len(lines) == len(PATCHES) + len(REQUIRED)
    assert lines[0] == "parameter_loader   active"
    assert lines[1] == "class_guard        off: not asked for by pygraph.patches"
    assert dataclasses.is_dataclass(pygraph.PatchStatus) and dataclasses.is_dataclass(pygraph.Status)


def test_one_line_is_logged_per_process(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYGRAPH_PATCHES", "saved_hooks_guard")
    with caplog.at_level(logging.INFO, logger="pygraph"):
        for _ in range(2):
            _compile("saved_hooks_guard")
    (record,) = (r for r in caplog.records if r.getMessage().startswith("patches of PyTorch"))
    assert record.name == "pygraph" and record.levelno == logging.INFO
    assert (
        "active: saved_hooks_guard, profiles; not active: parameter_loader off (not asked"
        in record.getMessage()
    )


def test_a_log_handler_that_raises_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    class Raises(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise ValueError("from the handler")

    handler = Raises()
    runtime.log.addHandler(handler)
    monkeypatch.setattr(runtime.log, "level", logging.DEBUG)
    try:
        _compile(ALL)
    finally:
        runtime.log.removeHandler(handler)
    assert _active() == FITTING


def test_it_may_be_asked_for_while_threads_compile() -> None:
    stops = threading.Event()
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            while not stops.is_set():
                assert len(pygraph.status().patches) == len(PATCHES) + len(REQUIRED)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    for patches in (EXACT, ALL, NONE):
        _compile(patches)
    stops.set()
    thread.join()
    assert not errors
    assert state._failures == {}


def test_threads_that_come_first_at_once_apply_a_patch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[str] = []
    monkeypatch.setattr(module_flag, "apply", lambda: applied.append("module_flag"))
    gate = threading.Barrier(8)

    def work() -> None:
        gate.wait()
        torch_patches.install(frozenset({"module_flag"}))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert applied == ["module_flag"]
