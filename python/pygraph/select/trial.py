"""A trial: finds the faster variant on the program's own calls (docs/explanation/selection.md).

The calls run uncaptured and replayed, alternately: the trial's *variants*. Each call starts on an idle
stream, in one of two ways:

    alone    gives the latency: from the call to the end of its last kernel
    behind   a sleeping kernel keeps the GPU busy until everything is issued; gives the GPU's own time,
             without gaps

In a loop, a call takes the larger of the host's and the GPU's time: its *period*.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import TypeVar

import torch

from pygraph.gpu.load import keep_busy

Result = TypeVar("Result")

UNCAPTURED = "uncaptured"
REPLAYED = "replayed"

_EQUAL = 0.01  # of a time; differences below are none
_CLEAR = 0.9  # so much faster that one sample tells
_FIRST_VERDICT, _LAST_ROUND = 4, 8  # rounds; each calls every variant once
_MOST_WITHOUT_ROOM = 3  # calls that find no memory
_MOST_NOT_STARTED = 50  # calls in a row that cannot be replayed


@dataclasses.dataclass(frozen=True)
class Sample:
    """The times of one call, in seconds. Either ``latency`` or ``device`` is set, depending on how the
    call started."""

    host: float
    latency: float | None = None
    device: float | None = None


@dataclasses.dataclass(frozen=True)
class Timing:
    """The times of one variant, in seconds per call: the smallest of its samples.

    noise: the spread of samples of one kind, as a share.
    memory: bytes that the variant keeps between calls.
    """

    host: float
    device: float
    latency: float
    noise: float
    memory: int

    @property
    def period(self) -> float:
        """Time per call when calls follow one another."""
        return max(self.host, self.device)


@dataclasses.dataclass(frozen=True)
class Decision:
    """The variant that was selected, and the timings of all variants.

    written: positions of the inputs that the function may write, as known by then. draws: whether it
    uses the device's default generator. branches: whether the graph that was timed has branches. None
    where that is not known: of decisions that were kept by an earlier version, and while they are not
    kept.
    suspects: positions of results that have differed between equal runs.
    """

    selected: str
    timings: Mapping[str, Timing]
    written: tuple[int, ...] | None = None
    draws: bool | None = None
    branches: bool | None = None
    suspects: tuple[int, ...] = ()


class Trial:
    """Chooses the next variant to run, collects the samples, and decides. Not thread-safe."""

    def __init__(self, memory: Mapping[str, int]) -> None:
        """memory: bytes that each variant keeps between calls, by its name."""
        self._memory = dict(memory)
        self._samples: dict[str, list[Sample]] = {name: [] for name in memory}
        self._warm: set[str] = set()
        self._round = 0
        self._without_room = 0
        self._not_started = 0  # in a row
        self._left = list(memory)

    @property
    def variant(self) -> str:
        """The variant of the next call."""
        return self._left[0]

    @property
    def sleep(self) -> float:
        """Seconds that the GPU must be kept busy before the next call; 0 if the call runs alone."""
        if self._round % 2 == 1:
            return 0.0
        known = [sample.host for sample in self._samples[self.variant]]
        return 1.5 * min(known) + 50e-6 if known else 0.0

    def note_no_room(self) -> bool:
        """Counts a call that found no memory. Returns whether there were too many. (Each makes
        PyTorch's allocator empty its caches.)"""
        self._without_room += 1
        return self._without_room >= _MOST_WITHOUT_ROOM

    def note_not_started(self) -> bool:
        """Counts a call that could not be replayed, for its stream say. Returns whether there were too
        many in a row. (Each waits for its stream.)"""
        self._not_started += 1
        return self._not_started >= _MOST_NOT_STARTED

    def add(self, sample: Sample) -> Decision | None:
        """Adds the sample of the call that ``variant`` and ``sleep`` described."""
        self._not_started = 0
        name = self._left[0]
        if name in self._warm:
            self._samples[name].append(sample)
        self._warm.add(name)  # the first call finds cold caches and allocates; it does not count
        left, number = self._left[1:], self._round
        if not left:
            number += 1
            names = list(self._memory)
            first = number // 2 % len(names)  # nobody always runs after the same one
            left = names[first:] + names[:first]
        is_round_over = number > self._round
        self._left, self._round = left, number  # last: after an interrupt the variant runs again
        return self._verdict() if is_round_over else None

    def _verdict(self) -> Decision | None:
        if self._round < 3:  # warm-up, alone, behind
            return None
        timings = {name: _summary(self._samples[name], self._memory[name]) for name in self._memory}
        best = min(timings, key=lambda name: timings[name].latency)
        others = [timing for name, timing in timings.items() if name != best]
        # A latency is at least as long as the period, so this holds whatever the device does.
        if all(timings[best].latency < _CLEAR * other.host for other in others):
            return Decision(best, timings)
        if self._round <= _FIRST_VERDICT:
            return None
        selected = choose(timings)
        is_clear = all(
            timings[selected].period < (1 - _EQUAL - timings[selected].noise) * other.period
            for name, other in timings.items()
            if name != selected
        )
        return Decision(selected, timings) if is_clear or self._round > _LAST_ROUND else None


def choose(timings: Mapping[str, Timing]) -> str:
    """The best variant: by period, then latency, then memory."""
    names = list(timings)
    for time_of in (attrgetter("period"), attrgetter("latency")):
        best = min(time_of(timings[name]) for name in names)
        names = [name for name in names if (1 - _EQUAL) * time_of(timings[name]) <= best]
    return min(names, key=lambda name: timings[name].memory)


def _summary(samples: list[Sample], memory: int) -> Timing:
    hosts = sorted(sample.host for sample in samples)
    latencies = sorted(sample.latency for sample in samples if sample.latency is not None)
    devices = sorted(sample.device for sample in samples if sample.device is not None)
    kinds = [kind for kind in (latencies, devices) if len(kind) > 1]
    noise = max(((kind[1] - kind[0]) / kind[0] for kind in kinds if kind[0] > 0), default=0.0)
    return Timing(hosts[0], devices[0], latencies[0], noise, memory)


def timed(run: Callable[[], Result], sleep: float) -> tuple[Result, Sample]:
    """Runs a call on the current stream and takes a sample. Waits for the stream before and after."""
    stream = torch.cuda.current_stream()
    stream.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    keep_busy(sleep)
    start.record(stream)
    called = time.perf_counter()
    result = run()
    returned = time.perf_counter()
    end.record(stream)
    end.synchronize()
    finished = time.perf_counter()
    host = returned - called
    if sleep > 0:
        return result, Sample(host, device=start.elapsed_time(end) / 1e3)
    return result, Sample(host, latency=finished - called)
