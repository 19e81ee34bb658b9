"""Threads that call models until the time is over, and what is seen meanwhile."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import os
import random
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from .load import Load
from .models import MODELS

_SMALL_CALLS = 100  # of the thread's small model, for each of another one
_CALLS_PER_CHECK = 100
_FAULT_KINDS = 24
_FAULTS_PER_RESET = 3  # dropped graphs are recorded anew, so that faults meet recordings
_REPORT_SECONDS = 30.0
_FIRST_CALLS = 1000
SHOWN = 20
# While one thread compiles, PyTorch 2.11 refuses calls in others, with any backend.
_TRACED_ELSEWHERE = "using FX to symbolically trace"
_COMPILING_SECONDS, _PAUSE_SECONDS = 900.0, 120.0  # after which threads count as hung


class Soak:
    """One process's run under one backend."""

    def __init__(self, args: argparse.Namespace, backend: str) -> None:
        self.args, self.backend = args, backend
        self.exceptions: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()
        self.results: dict[str, list[torch.Tensor]] = {}
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.calls = 0
        self._stop = threading.Event()
        self._calls = [0] * args.threads
        self._compiling = threading.Lock()
        self._pause = threading.Barrier(args.threads + 1)
        self._wants_pause = threading.Event()

    def run(self, seconds: float, replays: int, faults: Any) -> None:
        threads = [
            threading.Thread(target=self._work, args=(i,), daemon=True)
            for i in range(self.args.threads)
        ]
        for thread in threads:
            thread.start()
        try:
            self._drive(threads, seconds, replays, faults)
        except threading.BrokenBarrierError:
            self.exceptions["a thread hung, or ended before the others"] += 1
            faulthandler.dump_traceback()
        self._stop.set()
        for thread in threads:
            thread.join(timeout=self._join_seconds)
        self._count_replays()
        self.calls = sum(self._calls)

    def _drive(
        self, threads: list[threading.Thread], seconds: float, replays: int, faults: Any
    ) -> None:
        """While the threads call: measures, and lets the driver fail."""
        start = time.monotonic()
        self._pause.wait(_COMPILING_SECONDS)
        print(f"{self.backend}: compiled in {time.monotonic() - start:.0f} s", flush=True)
        end = time.monotonic() + seconds
        while sum(self._calls) < _FIRST_CALLS and time.monotonic() < end:
            time.sleep(0.05)
        self.first = self._measure()
        names = names_of_faults(faults)
        chooser = random.Random(0)
        last_fault, count = time.monotonic(), 0
        last_report = last_fault
        interval = max(0.2, (end - last_fault) / (2 * max(1, len(names)) + 1))
        while time.monotonic() < end and any(thread.is_alive() for thread in threads):
            time.sleep(0.1)
            if self._is_over:
                break
            if time.monotonic() - last_report > _REPORT_SECONDS:
                last_report = time.monotonic()
                self._report()
            if replays and count % 5 == 0 and self._replays() >= replays:
                break
            if names and time.monotonic() - last_fault > interval:
                last_fault = time.monotonic()
                errors = (faults.OUT_OF_MEMORY, faults.INVALID_VALUE, faults.NOT_SUPPORTED)
                faults.inject(names[count % len(names)], chooser.choice(errors), chooser.randint(1, 20))
                count += 1
                if count % _FAULTS_PER_RESET == 0:
                    self._count_replays()
                    _reset()
        if names:
            faults.clear()
        self._report()
        self.last = self._measure()

    def end_soon(self) -> None:
        """The load ends as if its time were over."""
        self._is_over = True

    def _report(self) -> None:
        print(f"{self.backend}: {sum(self._calls)} calls, {self._replays()} replays", flush=True)

    _is_over = False
    _replays_before_resets = 0
    _join_seconds = 20.0

    def _replays(self) -> int:
        return self._replays_before_resets + _replays_now()

    def _count_replays(self) -> None:
        """Graphs that are dropped take their counts with them."""
        self._replays_before_resets += _replays_now()

    @property
    def replays(self) -> int:
        return self._replays_before_resets

    def _work(self, number: int) -> None:
        is_on_gpu = self.args.device.startswith("cuda")
        stream = torch.cuda.Stream() if is_on_gpu else None
        with torch.cuda.stream(stream) if stream else _Nothing():
            try:
                with self._compiling:
                    loads = self._loads(number)
            except Exception as error:
                self._note(f"thread {number}", error)
                loads = []
            with contextlib.suppress(threading.BrokenBarrierError):
                self._pause.wait()
                self._loop(number, loads)

    def _loads(self, number: int) -> list[Load]:
        """This thread's: a small one first, then every so many-th of all."""
        models = MODELS[: self.args.models]
        kinds = [(m, trains) for m in models for trains in (False, True) if m.trains or not trains]
        # What draws stays in one thread.
        drawing = [kind for kind in kinds if kind[0].draws]
        others = [kind for kind in kinds if not kind[0].draws]
        mine = [(MODELS[0], False), *others[number :: self.args.threads]]
        mine += drawing if number == 0 else []
        loads = []
        for model, trains in mine:
            load = Load(model, trains, self.backend, self.args.device)
            with _without_graphs(self.backend):
                results = load.begin()
            if not model.draws:
                self.results.setdefault(load.name, results)
            loads.append(load)
        _synchronize(self.args.device)
        return loads

    def _loop(self, number: int, loads: list[Load]) -> None:
        turn = 0
        while not self._stop.is_set():
            if self._wants_pause.is_set():
                _use_libraries(self.args.device)
                self._pause.wait()  # measured
                self._pause.wait()  # go on
            if not loads:
                time.sleep(0.05)
                continue
            turn += 1
            for load in [loads[0]] * _SMALL_CALLS + [loads[turn % len(loads)]]:
                try:
                    load.step()
                    self._calls[number] += 1
                    if load.calls % _CALLS_PER_CHECK == 0 and load.check():
                        self.wrong[load.name] += 1
                except Exception as error:
                    self._note(load.name, error)
        for load in loads:
            try:
                if load.check():
                    self.wrong[load.name] += 1
            except Exception as error:
                self._note(load.name, error)

    def _note(self, where: str, error: Exception) -> None:
        line = (str(error).strip().splitlines() or [""])[0][:160]
        if _TRACED_ELSEWHERE in line:
            return
        key = f"{where}: {type(error).__name__}: {line}"
        self.exceptions[key] += 1
        if self.exceptions[key] == 1 and len(self.exceptions) <= SHOWN:
            traceback.print_exc()
        if "CUDA error" in line:
            self._stop.set()  # nothing works from here on

    def _measure(self) -> dict[str, float]:
        """Memory in MiB, while all threads wait."""
        self._wants_pause.set()
        self._pause.wait(_PAUSE_SECONDS)
        _synchronize(self.args.device)
        gc.collect()
        found = {"resident": _resident_mib()}
        if self.args.device.startswith("cuda"):
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info()
            reserved = torch.cuda.memory_reserved()
            found["allocated"] = torch.cuda.memory_allocated() / 2**20
            found["reserved"] = reserved / 2**20
            found["outside"] = (total - free - reserved) / 2**20  # the driver's, of all processes
        self._wants_pause.clear()
        self._pause.wait(_PAUSE_SECONDS)
        return {name: round(value, 1) for name, value in found.items()}


def _use_libraries(device: str) -> None:
    """On this thread's stream, uncaptured: cuBLAS's workspace there is 32 MiB, and PyTorch keeps it
    from the first product on, which may be one after a fault."""
    x = torch.ones(64, 64, device=device)
    torch.addmm(x[0], x, x)
    torch.mm(x, x)


def _without_graphs(backend: str) -> Any:
    if backend != "pygraph":
        return _Nothing()
    from pygraph import runtime

    return runtime.uncaptured()


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _reset() -> None:
    import pygraph

    pygraph.reset()


def _replays_now() -> int:
    import pygraph

    return sum(row.replays for row in pygraph.stats())


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def names_of_faults(faults: Any) -> list[str]:
    """Not of functions that give something back: what they keep is lost, and memory would grow."""
    if faults is None:
        return []
    names = [name for name in faults.names() if name not in faults.GIVE_BACK]
    return random.Random(1).sample(names, min(_FAULT_KINDS, len(names)))
