"""When audits are due."""

from __future__ import annotations

import pytest

from pygraph import options
from pygraph.verify.audit_schedule import Audits


def _due_calls(audits: Audits, seconds: float, latency: float, count: int) -> list[int]:
    """The numbers of the calls that are audited, where each audit takes so long."""
    calls = []
    audits.latency = latency
    replays = audits.extra
    for _ in range(count):
        due = audits.due_at(replays)
        assert due is not None
        replays = due + 1  # the audit's own, in the place of the call's
        calls.append(replays - audits.extra)
        audits.note_seconds(seconds)
    return calls


def test_the_schedule_where_audits_are_cheap() -> None:
    assert _due_calls(Audits(), 3e-3, 1e-3, 5) == [100, 1000, 10000, 20000, 30000]


def test_replays_of_the_verification_are_no_calls() -> None:
    assert _due_calls(Audits(extra=17, good_at=17), 3e-3, 1e-3, 3) == [100, 1000, 10000]


def test_from_the_third_on_audits_take_a_thousandth_of_the_calls_time() -> None:
    seconds, latency = 0.05, 1e-4
    calls = _due_calls(Audits(), seconds, latency, 20)
    assert calls[:2] == [100, 1000]
    for made, number in enumerate(calls[2:], start=3):
        assert made * seconds <= 1e-3 * number * latency * (1 + 1e-6)
    assert calls[-1] < 20 * 500_000 + 10_001  # and it is used


def test_a_given_interval_is_kept_to_at_any_cost() -> None:
    assert _due_calls(Audits(interval=10), 10.0, 1e-6, 11) == [*range(10, 101, 10), 110]
    assert _due_calls(Audits(interval=2500), 10.0, 1e-6, 4) == [100, 1000, 2500, 5000]


def test_a_closer_look_counts_with_its_audit() -> None:
    audits = Audits()
    audits.note_seconds(1.0)
    audits.note_seconds(4.0, goes_on=True)
    assert (audits.seconds, audits.last_seconds) == (5.0, 5.0)


def test_none_is_due_where_they_are_off() -> None:
    assert Audits(interval=0).due_at(1 << 40) is None


@pytest.mark.parametrize(("value", "audit"), [(0, 0), (False, 0), (True, None), (1, 1), (500, 500)])
def test_the_option(value: object, audit: int | None) -> None:
    assert options.parse(None, {"pygraph.audit": value}).own.audit == audit


@pytest.mark.parametrize("value", [-1, 1.5, "often", None])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"pygraph\.audit"):
        options.parse(None, {"pygraph.audit": value})
