"""Decisions on disk: found again, ignored when broken, safe with several processes."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
from pathlib import Path

import pytest

from pygraph.partition.tuple_arguments import unpacked_info
from pygraph.select import decision_cache
from pygraph.select.trial import REPLAYED, UNCAPTURED, Decision, Timing

from .stand_ins import INFO

_DECISION = Decision(
    REPLAYED, {UNCAPTURED: Timing(3.0, 1.0, 3.5, 0.02, 0), REPLAYED: Timing(0.5, 1.0, 1.5, 0.01, 64)}
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(decision_cache, "_machine", lambda device: f"gpu {device}")
    return tmp_path


def test_a_decision_is_found_again() -> None:
    key = decision_cache.key_of("program", b"signature", 0)
    assert decision_cache.load(key) is None
    decision_cache.save(key, _DECISION)
    assert decision_cache.load(key) == _DECISION
    decision_cache.forget(key)
    assert decision_cache.load(key) is None


@pytest.mark.parametrize(("written", "draws"), [((), False), ((0, 7), True)])
def test_side_effects_are_kept_with_it(written: tuple[int, ...], draws: bool) -> None:
    key = decision_cache.key_of("program", b"signature", 0)
    kept = dataclasses.replace(_DECISION, written=written, draws=draws)
    decision_cache.save(key, kept)
    assert decision_cache.load(key) == kept


@pytest.mark.parametrize("branches", [None, False, True])
def test_what_is_known_of_its_graph_is_kept_with_it(branches: bool | None) -> None:
    key = decision_cache.key_of("program", b"signature", 0)
    kept = dataclasses.replace(_DECISION, branches=branches, suspects=(0, 7))
    decision_cache.save(key, kept)
    assert decision_cache.load(key) == kept


def test_of_the_graph_of_an_earlier_version_nothing_is_known() -> None:
    key = decision_cache.key_of("program", b"signature", 0)
    decision_cache.save(key, _DECISION)
    path = decision_cache._path(key)
    data = json.loads(path.read_text())
    del data["branches"], data["suspects"]
    path.write_text(json.dumps(data))
    assert decision_cache.load(key) == _DECISION


@pytest.mark.parametrize(
    "effects",
    [
        *(
            {"written": [0]},
            {"draws": True},
            {"written": [0], "draws": 1},
            {"written": 3, "draws": True},
        ),
        *({"written": [value], "draws": True} for value in (-1, 1.0, "0", None, True)),
        *({"suspects": [value]} for value in (-1, 1.0, "0", None, True)),
        *({"suspects": value} for value in (1, None, {"0": 1})),
        *({"branches": value} for value in (2, "yes", [])),
    ],
)
def test_what_is_broken_beside_a_decision_makes_it_be_ignored(effects: dict[str, object]) -> None:
    key = decision_cache.key_of("program", b"signature", 0)
    decision_cache.save(key, _DECISION)
    path = decision_cache._path(key)
    path.write_text(json.dumps({**json.loads(path.read_text()), **effects}))
    assert decision_cache.load(key) is None


def test_keys_tell_programs_signatures_and_machines_apart() -> None:
    keys = {
        decision_cache.key_of(program, signature, device)
        for program in ("a", "ab")
        for signature in (b"c", b"bc")
        for device in (0, 1)
    }
    assert len(keys) == 8


def test_keys_tell_tuples_of_other_lengths_apart() -> None:
    """Their elements may have the same signature."""
    info = dataclasses.replace(INFO, argument_count=2, program="program")
    programs = [unpacked_info(info, lengths).program for lengths in ((1, 2), (2, 1))]
    assert len({decision_cache.key_of(program, b"signature", 0) for program in programs}) == 2
    assert unpacked_info(dataclasses.replace(info, program=""), (1, 2)).program == ""


def test_a_program_without_identity_is_not_kept(folder: Path) -> None:
    assert decision_cache.key_of("", b"signature", 0) == ""
    decision_cache.save("", _DECISION)
    assert decision_cache.load("") is None
    assert list(folder.iterdir()) == []


def _written(selected: object, timings: list[str], **replaced: object) -> bytes:
    """A file with such a decision. replaced: parts of the first timing."""
    times = {"host": 1.0, "device": 1.0, "latency": 1.0, "noise": 0.0, "memory": 0}
    data = {name: {**times, **(replaced if i == 0 else {})} for i, name in enumerate(timings)}
    return json.dumps({"selected": selected, "timings": data}).encode()


_BOTH = [UNCAPTURED, REPLAYED]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1, 2]",
        b'{"selected": "x", "timings": {}}',
        b"\xff\xfe",
        b"null",
        b"[" * 100_000,
        _written(UNCAPTURED, [UNCAPTURED]),  # nothing that it was compared with
        _written(REPLAYED, [REPLAYED]),
        _written("another", [*_BOTH, "another"]),
        _written([UNCAPTURED], _BOTH),
        _written(UNCAPTURED, _BOTH, host="fast"),
        _written(UNCAPTURED, _BOTH, host=None),
        _written(UNCAPTURED, _BOTH, latency=float("nan")),
        _written(UNCAPTURED, _BOTH, device=-1.0),
        _written(UNCAPTURED, _BOTH, device=10**400),
        _written(UNCAPTURED, _BOTH, further=1.0),
    ],
)
def test_a_broken_file_is_ignored(content: bytes) -> None:
    key = decision_cache.key_of("program", b"signature", 0)
    decision_cache.save(key, _DECISION)
    decision_cache._path(key).write_bytes(content)
    assert decision_cache.load(key) is None
    decision_cache.save(key, _DECISION)
    assert decision_cache.load(key) == _DECISION


@pytest.mark.parametrize("error", [PermissionError("no"), OSError("disk full")])
def test_a_folder_that_cannot_be_used_is_no_error(
    monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    def no_folder() -> str:
        raise error

    monkeypatch.setattr(decision_cache, "cache_dir", no_folder)
    decision_cache.save("key", _DECISION)
    assert decision_cache.load("key") is None
    decision_cache.forget("key")


def _write(folder: Path, key: str, host: float) -> None:
    path = folder / "pygraph" / "v1" / f"{key}.json"
    decision_cache._path = lambda _: path  # type: ignore[assignment]
    timing = Timing(host, host, host, 0.0, 0)
    for _ in range(300):
        decision_cache.save(key, Decision(UNCAPTURED, {UNCAPTURED: timing, REPLAYED: timing}))
        found = decision_cache.load(key)
        assert found is not None
        times = found.timings[UNCAPTURED]
        assert times.host == times.device == times.latency


def test_processes_that_write_at_the_same_time_never_show_half_a_file(folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(folder, "key", float(i))) for i in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 4
    assert not list((folder / "pygraph" / "v1").glob("*.tmp"))
