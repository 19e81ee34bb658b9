"""When a signature is worth a recording; no GPU needed."""

from __future__ import annotations

import pytest

from pygraph.partition.recording_policy import RecordingPolicy


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
