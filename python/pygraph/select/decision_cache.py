"""Decisions of trials, and what is known of the function and its graph then, kept on disk beside
Inductor's cache.

One small file (:mod:`pygraph.stored`) per compiled program, signature, kind of GPU and version. A file
that cannot be read, or contains anything else than a decision, counts as missing. Nothing here raises.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import math
from collections.abc import Iterable
from pathlib import Path

import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir

from pygraph import runtime, stored
from pygraph._version import __version__
from pygraph.select.trial import REPLAYED, UNCAPTURED, Decision, Timing

_FORMAT = 1
_VARIANTS = {UNCAPTURED, REPLAYED}


def key_of(program: str, signature: bytes, device: int) -> str:
    """The file name of a decision; empty if the program has no identity on disk, so that nothing is
    stored."""
    if not program:
        return ""
    digest = hashlib.sha256()
    for part in (program.encode(), signature, _machine(device).encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def load(key: str) -> Decision | None:
    """The decision under that key, or None if there is none that can be read."""
    if not key:
        return None
    try:
        data = stored.read(_path(key))
        timings = {name: Timing(**timing) for name, timing in data["timings"].items()}
        written = data.get("written")
        decision = Decision(
            data["selected"],
            timings,
            None if written is None else tuple(written),
            data.get("draws"),
            data.get("branches"),
            tuple(data.get("suspects", ())),
        )
        return decision if _is_complete(decision) else None
    except Exception:
        return None


def _is_complete(decision: Decision) -> bool:
    """Whether a decision has everything that is computed from it later. May raise."""
    numbers = [number for timing in decision.timings.values() for number in dataclasses.astuple(timing)]
    written, draws = decision.written, decision.draws
    has_effects = isinstance(draws, bool) and _are_positions(written or ())
    return (
        ((written is None and draws is None) or (written is not None and has_effects))
        and (decision.branches is None or isinstance(decision.branches, bool))
        and _are_positions(decision.suspects)
        and decision.selected in _VARIANTS
        and set(decision.timings) == _VARIANTS
        and all(math.isfinite(number) and number >= 0 for number in numbers)
    )


def _are_positions(values: Iterable[object]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def save(key: str, decision: Decision) -> None:
    """Stores a decision. Other processes may do so at the same time."""
    if not key:
        return
    try:
        stored.write(_path(key), dataclasses.asdict(decision))
    except Exception as error:  # the folder cannot be written, or has no name
        runtime.log.debug("a selection was not kept: %s", error)


def forget(key: str) -> None:
    """Removes a decision that turned out not to hold."""
    if key:
        with contextlib.suppress(Exception):
            _path(key).unlink(missing_ok=True)


def _path(key: str) -> Path:
    return Path(cache_dir()) / "pygraph" / f"v{_FORMAT}" / f"{key}.json"


@functools.cache
def _machine(device: int) -> str:
    """Everything but the program that a timing depends on: GPU, driver, versions."""
    gpu = torch.cuda.get_device_properties(device)
    driver = runtime.engine().driver_version()
    return f"{__version__}|{torch.__version__}|{driver}|{gpu.name}|{gpu.multi_processor_count}"
