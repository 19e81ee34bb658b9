"""What the fuzzer takes for rounding: as much as rounding moves a program's results, and no more.

Here "pygraph" is a compiler whose code rounds in another way than Inductor's: the program as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.fuzz import compiled_level
from tests.fuzz.check import Outcome, check
from tests.fuzz.program import Call, Input, Program, Statement, from_json
from tests.fuzz.rounding import moved_by_rounding

pytestmark = pytest.mark.filterwarnings("ignore")

# Its rows are alike, and the gradient is zero but for what rounding leaves over, about 1e-9. The blocks
# that Inductor measured to be the fastest for two compilations sum eight squares in two orders.
GRADIENT_OF_NOTHING: dict[str, Any] = {
    "seed": 112640,
    "level": "compiled",
    "kind": "inference",
    "inputs": [
        {
            "name": "a0",
            "shape": [5, 8],
            "dtype": "float32",
            "layout": "expanded",
            "is_parameter": False,
            "values": "normal",
        },
        {
            "name": "a1",
            "shape": [5, 8],
            "dtype": "float32",
            "layout": "plain",
            "is_parameter": False,
            "values": "zero",
        },
        {
            "name": "a2",
            "shape": [5],
            "dtype": "bool",
            "layout": "plain",
            "is_parameter": True,
            "values": "normal",
        },
    ],
    "statements": [
        {
            "outputs": ["v1"],
            "template": "{0}.transpose(-1, -2) @ {0}",
            "args": ["a0", "a0"],
            "meta": "",
            "writes": [],
            "cut": False,
            "chance": False,
            "fragile": False,
            "draws": False,
        },
        {
            "outputs": ["v2"],
            "template": "F.normalize({0}, dim=-1)",
            "args": ["v1", "v1"],
            "meta": "",
            "writes": [],
            "cut": False,
            "chance": False,
            "fragile": False,
            "draws": False,
        },
    ],
    "returns": ["v2"],
    "calls": [
        {"size": 0, "reuse": {"a2": "same"}, "values": "", "before": [], "after": []},
        {
            "size": 0,
            "reuse": {"a2": "same"},
            "values": "",
            "before": ["replace_parameters"],
            "after": [],
        },
        {
            "size": 0,
            "reuse": {"a2": "same"},
            "values": "",
            "before": ["change_kept"],
            "after": ["drop"],
        },
        {
            "size": 0,
            "reuse": {"a1": "same", "a2": "same"},
            "values": "",
            "before": [],
            "after": ["keep"],
        },
    ],
    "sizes": [8],
    "cuts": [],
    "settings": {
        "frees": True,
        "hints": "none",
        "shipped": False,
        "mode": "plain",
        "lanes": 8,
        "away": False,
        "dynamic": False,
        "grad": "training",
        "training": "nested",
    },
}


def _check(
    monkeypatch: pytest.MonkeyPatch, program: Program, change: Callable[[list[Any]], Any]
) -> Outcome:
    """change: what the other compiler gets wrong, of the results."""
    make = compiled_level.make

    def other(program: Program, device: str, backend: str) -> Callable[[list[Any]], list[Any]]:
        if backend != "pygraph":
            return make(program, device, backend)
        run = make(program, device, "eager")

        def changed(args: list[Any]) -> list[Any]:
            results = run(args)
            with torch.no_grad():
                change(results)
            return results

        return changed

    monkeypatch.setattr(compiled_level, "make", other)
    return check(program, "cpu")


def test_a_gradient_of_rounding_errors_is_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = _check(monkeypatch, from_json(GRADIENT_OF_NOTHING), lambda results: None)
    assert outcome.verdict == "by chance", outcome
    assert "moves the results as far" in outcome.detail[-1]


@pytest.mark.parametrize("error", [1e-6, 1e-3])
def test_a_gradient_that_is_no_rounding_error_is_wrong(
    monkeypatch: pytest.MonkeyPatch, error: float
) -> None:
    """The norm of what it is off by, of a gradient that is zero."""
    program = from_json(GRADIENT_OF_NOTHING)
    outcome = _check(monkeypatch, program, lambda results: results[3][0, 0].add_(error))
    assert outcome.verdict == "wrong", outcome


def test_results_that_rounding_hardly_moves_have_little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other result of the same program."""
    program = from_json(GRADIENT_OF_NOTHING)
    outcome = _check(monkeypatch, program, lambda results: results[0].mul_(1.05))
    assert outcome.verdict == "wrong", outcome


def _moved(template: str, values: str = "normal") -> float:
    program = Program(
        *(3, "compiled", "inference", [Input("a0", [6, 6], values=values)]),
        *([Statement(["v1"], template, ["a0"])], ["v1"], [Call()]),
        settings={**GRADIENT_OF_NOTHING["settings"], "grad": "no_grad"},
    )
    return moved_by_rounding(program, "cpu")[0, "result 0"]


def test_noise_has_the_size_of_what_was_cancelled() -> None:
    assert _moved("{0} * 1000 - {0} * 1000") > 1e-4
    assert 1e-8 < _moved("{0} - {0} * 0.5") < 1e-5
    assert _moved("({0} @ {0}).double()") > 1e-8
    assert _moved("({0} * 1000 - {0}.mean() * 1000).mean()") > 1e-6  # within an operator that sums


def test_what_does_not_round_does_not_move() -> None:
    for template in (
        "{0}.t()",
        "{0}.flip(0)",
        "torch.cat([{0}, {0}])",
        "F.relu({0})",
        "{0}.sort(0)[0]",
    ):
        assert _moved(template) == 0, template
    assert _moved("{0} + {0}", "zero") == 0
