"""A run of the fuzzer: the seeds to go, and what came of those that are done."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

from .generate import COMPILED_EVERY, generate
from .program import Program

REDUCED = 20  # failures that are reduced and written out
_FAILURES = ("wrong", "crashed", "hung", "leaked", "harness")
_UNLIKELY = 100  # so many failures end the run: more tell nothing new
# For a program that runs when the time is over. Then it is unfinished, and a run that goes on from the
# report's next_seed repeats it.
_GRACE = 5.0


class Campaign:
    """Shared by one thread per worker. end: when programs that still run are given up."""

    def __init__(self, first: int, count: int, seconds: float, level: str, mode: str = "") -> None:
        self._next, self._end = first, first + count
        self._level = level
        self._mode = mode
        self._start = time.monotonic()
        self._seconds: float | None = None  # once it is over
        self._deadline = self._start + seconds
        self.end = self._deadline + _GRACE
        self._lock = threading.Lock()
        self._open: set[int] = set()
        self.verdicts: dict[str, Counter[str]] = {"partition": Counter(), "compiled": Counter()}
        self.sums: Counter[str] = Counter()
        self.states: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.failures: list[dict[str, Any]] = []
        self.unjudged: list[int] = []

    def level_of(self, seed: int) -> str:
        return self._level or ("compiled" if seed % COMPILED_EVERY == 0 else "partition")

    def request(self, seed: int) -> dict[str, Any]:
        return {"seed": seed, "level": self.level_of(seed), "mode": self._mode}

    def program(self, seed: int) -> Program:
        return generate(seed, self.level_of(seed), self._mode)

    def take(self) -> int | None:
        """The next seed; None where the run is to end."""
        with self._lock:
            is_over = self._next >= self._end or time.monotonic() > self._deadline
            if is_over or len(self.failures) >= _UNLIKELY:
                return None
            self._next += 1
            self._open.add(self._next - 1)
            return self._next - 1

    def note(self, seed: int, reply: dict[str, Any]) -> None:
        verdict = reply["verdict"]
        if verdict in ("equal", "by chance") and reply.get("leaked"):
            verdict = "leaked"
            reply["detail"] = [f"{reply['leaked']} bytes stay allocated", *reply["detail"]]
        with self._lock:
            self._open.discard(seed)
            self.verdicts[self.level_of(seed)][verdict] += 1
            for name in ("calls", "raised", "replays"):
                self.sums[name] += reply.get(name, 0)
            self.sums["with replays"] += bool(reply.get("replays"))
            self.states.update(reply.get("states", {}))
            self.reasons.update({_kind_of(r): n for r, n in reply.get("reasons", {}).items()})
            if verdict == "unjudged":
                self.unjudged.append(seed)
            if verdict in _FAILURES:
                failure = {"seed": seed, "verdict": verdict, "detail": reply["detail"]}
                self.failures.append(failure | {"evidence": reply.get("evidence", [])})
                if len(self.failures) <= REDUCED:
                    print(f"seed {seed} ({self.level_of(seed)}): {verdict}", flush=True)
                    print(
                        "".join(f"    {line[:220]}\n" for line in _ends(reply["detail"])),
                        end="",
                        flush=True,
                    )

    def stop_clock(self) -> None:
        """What comes after it does not count as time of the run."""
        self._seconds = time.monotonic() - self._start

    def report(self) -> dict[str, Any]:
        """At any time, by any thread."""
        with self._lock:
            seconds = time.monotonic() - self._start if self._seconds is None else self._seconds
            programs = {level: sum(counts.values()) for level, counts in self.verdicts.items()}
            return {
                "seconds": round(seconds, 1),
                "programs": programs,
                "verdicts": {level: dict(counts) for level, counts in self.verdicts.items()},
                **dict(self.sums),
                "graphs": dict(self.states),
                "refused": dict(self.reasons.most_common(30)),
                "unjudged": self.unjudged[:100],
                "failures": [dict(failure) for failure in self.failures],
                "next_seed": min(self._open, default=self._next),
            }


def _ends(lines: list[str]) -> list[str]:
    return lines if len(lines) <= 5 else [lines[0], *lines[-4:]]


def _kind_of(reason: str) -> str:
    """Reasons without what differs from program to program."""
    return "".join("#" if c.isdigit() else c for c in reason)[:110]
