"""The GPU time of each graph, from a profiler's trace.

A replay has a range with its graph's name on the CPU. Which kernels did it launch? The trace tells in
one of three ways: the launch is traced and lies in the range; the kernel has its "External id"; or,
as PyTorch's profiler does not trace launches of graphs by the driver, the kernels that no traced call
has launched come in as many launches as there are ranges left, in the same order. If none of these ways
identifies the kernels of a replay, its graph is left out.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable
from typing import Any


@dataclasses.dataclass(eq=False)
class _Range:
    name: str
    thread: Any
    begin: float
    end: float
    external_id: Any


@dataclasses.dataclass(eq=False)
class _Launch:
    """Kernels of one correlation: those of one graph launch."""

    external_ids: set[Any] = dataclasses.field(default_factory=set)
    us: float = 0.0


def graph_times(events: Iterable[dict[str, Any]], names: Collection[str]) -> dict[str, float]:
    """Microseconds of the kernels of each graph's replays, by the name of its ranges.

    events: of a chrome trace. A graph is left out if the kernels of one of its replays could not be
        identified.
    """
    ranges: list[_Range] = []
    calls: dict[int, dict[str, Any]] = {}
    launches: dict[int, _Launch] = {}
    for event in events:
        arguments = event.get("args", {})
        correlation = arguments.get("correlation")
        category = event.get("cat")
        if category == "user_annotation" and event.get("name") in names:
            end = event["ts"] + event["dur"]
            external_id = arguments.get("External id")
            ranges.append(_Range(event["name"], event.get("tid"), event["ts"], end, external_id))
        elif category in ("cuda_runtime", "cuda_driver") and correlation is not None:
            calls[correlation] = event
        elif category == "kernel" and correlation is not None:
            launch = launches.setdefault(correlation, _Launch())
            launch.us += float(event["dur"])
            launch.external_ids.add(arguments.get("External id"))
    ranges.sort(key=lambda item: item.begin)
    return _times(ranges, _owners(ranges, calls, launches))


def _times(ranges: list[_Range], owners: dict[_Range, list[_Launch]]) -> dict[str, float]:
    unknown = {item.name for item in ranges if item not in owners}
    times: dict[str, float] = {}
    for item, launched in owners.items():
        if item.name not in unknown:
            times[item.name] = times.get(item.name, 0.0) + sum(launch.us for launch in launched)
    return times


def _owners(
    ranges: list[_Range], calls: dict[int, dict[str, Any]], launches: dict[int, _Launch]
) -> dict[_Range, list[_Launch]]:
    owners: dict[_Range, list[_Launch]] = {}
    left: list[_Launch] = []  # that no traced call has made, and no range claims
    # Later launches have larger numbers.
    for correlation, launch in sorted(launches.items()):
        call = calls.get(correlation)
        owner = _around(ranges, call) if call is not None else _by_id(ranges, launch)
        if owner is not None:
            owners.setdefault(owner, []).append(launch)
        elif call is None:
            left.append(launch)
    waiting = [item for item in ranges if item not in owners]
    if len(waiting) == len(left) and not _overlap(waiting):
        owners |= {item: [launch] for item, launch in zip(waiting, left, strict=True)}
    return owners


def _around(ranges: list[_Range], call: dict[str, Any]) -> _Range | None:
    for item in ranges:
        if item.thread == call.get("tid") and item.begin <= call["ts"] <= item.end:
            return item
    return None


def _by_id(ranges: list[_Range], launch: _Launch) -> _Range | None:
    if len(launch.external_ids) != 1 or None in launch.external_ids:
        return None
    found = [item for item in ranges if item.external_id in launch.external_ids]
    return found[0] if len(found) == 1 else None


def _overlap(ranges: list[_Range]) -> bool:
    """Whether ranges of different threads overlap, so that the order of ranges is not that of the
    launches."""
    return any(first.end > second.begin for first, second in itertools.pairwise(ranges))
