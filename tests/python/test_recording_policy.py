"""When a signature is worth a recording; no GPU needed."""

from __future__ import annotations

import pytest

from pygraph.partition.recording_policy import Backoff, RecordingPolicy, Retries


def after_four_recordings(max_graphs: int = 256) -> RecordingPolicy:
    policy = RecordingPolicy(max_graphs)
    for _ in range(4):
        policy.note_recording(0.1)
    return policy


def test_static_shapes_are_recorded_at_once_and_varying_ones_when_it_pays() -> None:
    fresh = RecordingPolicy(256)
    assert fresh.seconds_to_wait(has_numbers=False) == 0
    assert fresh.seconds_to_wait(has_numbers=True) == pytest.approx(0.01)  # assumed
    assert after_four_recordings().seconds_to_wait(has_numbers=False) == pytest.approx(0.1)
    assert after_four_recordings().seconds_to_wait(has_numbers=True) == pytest.approx(0.1)


def test_shapes_that_push_each_other_out_are_recorded_ever_less() -> None:
    policy = after_four_recordings(max_graphs=4)
    prices = []
    for dropped in (0, 3, 1, 4, 8):  # 0, 3, 4, 8 and 16 in all
        policy.note_dropped(dropped)
        prices.append(policy.seconds_to_wait(has_numbers=False))
    assert prices == pytest.approx([0.1, 0.1, 0.2, 0.4, 1.6])


def test_a_shape_that_an_earlier_process_selected_a_graph_for_is_recorded_at_once() -> None:
    policy = after_four_recordings(max_graphs=4)
    for has_numbers in (False, True):
        assert policy.seconds_to_wait(has_numbers, is_selected=True) == 0
    policy.note_dropped(1)  # shapes push each other out
    assert policy.seconds_to_wait(True, is_selected=True) == pytest.approx(0.1)


def test_memory_that_was_short_is_asked_for_three_times_ever_later() -> None:
    policy = RecordingPolicy(256)
    assert [policy.calls_until_retry() for _ in range(5)] == [1000, 4000, 16000, 0, 0]


def test_pauses_grow_up_to_the_longest() -> None:
    backoff = Backoff(3, 2, longest=10)
    assert [backoff.next() for _ in range(4)] == [3, 6, 10, 10]


def _tries(calls: int, is_transient: bool, is_known: bool) -> list[int]:
    """The numbers of the calls that are recorded, of so many whose recordings fail."""
    retries = Retries()
    tried = []
    for number in range(1, calls + 1):
        if not retries.is_to_skip(is_known):
            tried.append(number)
            retries.note(is_transient)
    return tried


def test_what_fails_for_reasons_of_its_calls_is_tried_ever_later() -> None:
    assert _tries(200, is_transient=True, is_known=True) == [1, 2, 3, 4, 5, 38, 103]


def test_what_fails_in_new_threads_is_left_to_others() -> None:
    assert _tries(10, is_transient=False, is_known=False) == [1, 2, 3]
    assert _tries(10, is_transient=False, is_known=True) == list(range(1, 11))
