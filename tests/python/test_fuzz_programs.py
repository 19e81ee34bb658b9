"""The fuzzer of tests/fuzz, without a GPU: its programs, what it finds, how it reduces them."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.fuzz import faulty, reproducer
from tests.fuzz.check import check
from tests.fuzz.generate import generate
from tests.fuzz.observe import Seen
from tests.fuzz.partition_level import direct
from tests.fuzz.program import (
    UNCAPTURED,
    Call,
    Input,
    Program,
    Statement,
    from_json,
    is_valid,
    partition_source,
    parts_of,
    to_json,
)
from tests.fuzz.reduce import reduce, size_of
from tests.fuzz.series import FatalError

_SETTINGS = {
    **{"frees": True, "hints": "exact", "shipped": False, "mode": "plain", "lanes": 1, "away": False},
}
pytestmark = pytest.mark.filterwarnings("ignore")


def _program(*statements: Statement, returns: list[str], calls: int = 4) -> Program:
    inputs = [Input("a0", [4, 4]), Input("a1", [4, 4])]
    series = [Call() for _ in range(calls)]
    return Program(
        *(3, "partition", "inference", inputs, list(statements), returns, series),
        settings=dict(_SETTINGS),
    )


def _writing() -> Program:
    return _program(
        Statement(["v1"], "torch.sin({0})", ["a0"]),
        Statement([], "{0}.add_({1})", ["a1", "v1"], writes=[0]),
        Statement(["v2"], "{0} @ {1}", ["a1", "v1"]),
        returns=["v2", "v1"],
    )


def _drawing() -> Program:
    return _program(Statement(["v1"], "torch.rand_like({0})", ["a0"], draws=True), returns=["v1"])


@pytest.mark.parametrize("level", ["partition", "compiled"])
def test_a_seed_is_a_program(level: str) -> None:
    for seed in range(40):
        program = generate(seed, level)
        assert to_json(program) == to_json(generate(seed, level))
        assert from_json(to_json(program)) == program
        assert is_valid(program)


def test_programs_are_of_many_kinds() -> None:
    programs = [generate(seed, "partition") for seed in range(300)]
    templates = {s.template for p in programs for s in p.statements}
    assert len(templates) > 150
    assert sum(any(s.writes for s in p.statements) for p in programs) > 60
    assert sum(p.draws for p in programs) > 15
    assert sum(p.varies for p in programs) > 15
    assert sum(len(parts_of(p)) > 1 for p in programs) > 30
    assert {p.settings["mode"] for p in programs} == {"plain", "streams", "thread", "concurrent"}
    assert {p.kind for p in programs} == {"inference", "forward", "backward"}
    assert {i.layout for p in programs for i in p.inputs} > {"plain", "expanded", "misaligned"}
    actions = Counter(action for p in programs for c in p.calls for action in c.before)
    assert len(actions) > 10


def test_programs_give_what_they_give_when_they_run_again() -> None:
    outcomes = [check(generate(seed, "partition"), "cpu", direct) for seed in range(40)]
    assert all(o.verdict in ("equal", "raises") for o in outcomes), outcomes
    assert sum(o.raised for o in outcomes) < 0.2 * sum(o.calls for o in outcomes)


def test_partitions_consume_what_nobody_needs_afterwards() -> None:
    program = _writing()
    program.cuts = [2]
    first, second = parts_of(program)
    assert (first.takes, first.gives) == (["a0", "a1"], ["v1"])
    assert (second.takes, second.gives) == (["v1", "a1"], ["v2"]) or second.takes == ["a1", "v1"]
    assert first.dies == {"a0"} and second.dies == {"a1"}
    source = partition_source(program)
    assert source.count("args.clear()") == 3
    assert "del a0" in source


@pytest.mark.parametrize(
    ("fault", "program", "what"),
    [
        ("stale", _writing(), "result 0"),
        ("twice", _writing(), "argument a1"),
        ("unwritten", _writing(), "argument a1"),
        ("raises", _writing(), "error"),
        ("draws", _drawing(), "random"),
        ("shared", _program(Statement(["v1"], "{0}[1:]", ["a0"]), returns=["v1"]), "shared"),
    ],
)
def test_a_wrong_graph_is_found(fault: str, program: Program, what: str) -> None:
    assert check(program, "cpu", direct).verdict == "equal"
    outcome = check(program, "cpu", faulty.wrap(fault))
    assert outcome.verdict == "wrong"
    assert any(line.startswith(f"call 2, {what}") for line in outcome.detail), outcome.detail


@pytest.mark.parametrize(
    ("mode", "uncaptured", "verdict"),
    [
        ("concurrent", "of PyTorch's", "by chance"),
        ("concurrent", "another", "wrong"),
        ("plain", "of PyTorch's", "wrong"),
    ],
)
def test_what_concurrent_calls_raise_by_chance_is_not_wrong(
    monkeypatch: pytest.MonkeyPatch, mode: str, uncaptured: str, verdict: str
) -> None:
    """Uncaptured runs: the first does not raise, a later one does."""
    raising = [Seen(0, "RuntimeError", uncaptured)]
    results = iter([[Seen(0)], [Seen(0, "RuntimeError", "of PyTorch's")], raising])
    program = _writing()
    program.settings["mode"] = mode
    monkeypatch.setattr("tests.fuzz.check.series", lambda *args: next(results, [Seen(0)]))
    assert check(program, "cpu", direct).verdict == verdict


def test_the_series_are_named_before_they_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[str] = []
    check(_writing(), "cpu", direct, named.append)
    assert named == [UNCAPTURED, "graphed"]

    def lost(*args: object) -> None:
        raise FatalError("CUDA error: misaligned address")

    named.clear()
    monkeypatch.setattr("tests.fuzz.check.synchronize", lost)  # where it shows
    with pytest.raises(FatalError):
        check(_writing(), "cpu", direct, named.append)
    assert named == [UNCAPTURED]


def test_sums_in_any_order_are_not_wrong_and_other_values_are(monkeypatch: pytest.MonkeyPatch) -> None:
    program = _program(Statement(["v1"], "{0}.cumsum(0)", ["a0"], chance=True), returns=["v1"])

    def off_by(factor: float) -> object:
        def wrap(program: Program, function: object, number: int, device: str) -> object:
            return lambda args: [r * factor for r in function(args)]  # type: ignore[operator]

        return wrap

    assert check(program, "cpu", off_by(1 + 1e-5)).verdict == "by chance"  # type: ignore[arg-type]
    assert check(program, "cpu", off_by(2)).verdict == "unjudged"  # type: ignore[arg-type]
    program.statements[0].chance = False
    assert check(program, "cpu", off_by(1 + 1e-5)).verdict == "wrong"  # type: ignore[arg-type]


def test_a_failing_program_is_made_smaller_until_nothing_can_go() -> None:
    def fails(program: Program) -> bool:
        return any("add_" in s.template for s in program.statements) and len(program.calls) > 2

    program = next(p for p in (generate(seed, "partition") for seed in range(200)) if fails(p))
    before = copy.deepcopy(program)
    smallest = reduce(program, fails, seconds=60)
    assert program == before
    assert is_valid(smallest) and fails(smallest)
    assert len(smallest.calls) == 3
    assert len(smallest.statements) <= 3
    assert size_of(smallest) < size_of(before)


def test_a_reproducer_is_a_test_that_runs_the_program(tmp_path: Path) -> None:
    path = reproducer.write(tmp_path, _writing(), "cpu", "wrong", ["call 2, result 0: differs"])
    text = path.read_text().replace("check(from", "check(wrap=direct, device='cpu', program=from")
    path.write_text("from tests.fuzz.partition_level import direct\n" + text.replace(', "cpu")', ")"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_a_compiled_program_is_compared_with_plain_inductor() -> None:
    """Without a GPU the backend falls back; the way there is the same."""
    program = _program(
        Statement(["v1"], "torch.sin({0})", ["a0"]),
        Statement(["v2"], "{0} @ {1}", ["a1", "v1"]),
        returns=["v2", "v1"],
    )
    program.level = "compiled"
    for way in ("backward", "retain_graph", "grad", "two losses", "nested", "accumulate", "checkpoint"):
        program.settings |= {"dynamic": None, "grad": "training", "training": way}
        outcome = check(program, "cpu")
        assert (outcome.verdict, outcome.raised) == ("equal", 0), (way, outcome)


def test_settings_are_what_they_were_after_a_program() -> None:
    program = _writing()
    program.calls[1].before = ["tf32", "benchmark", "cudnn_deterministic", "deterministic", "flash"]
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert check(program, "cpu", direct).verdict == "equal"
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark) == before
    assert not torch.are_deterministic_algorithms_enabled()
