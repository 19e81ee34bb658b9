"""Runs random programs three times: uncaptured, with calls that the engine makes, and with calls that
Python makes. ``python -m tests.fuzz.served.run --seed 0 --count 1000``.

Graphs are stand-ins that run no Python and count no versions (tests/python/frozen_world.py). After each
call all values must be the same, a call must be replayed by the engine if and only if Python replays
it, and each version that the uncaptured call increases must have increased.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import gc
import logging
import random
import time
import traceback
import warnings
import weakref
from typing import Any

import pytest
import torch

import pygraph
from pygraph import runtime
from pygraph.callables import serving
from tests.python import frozen_world
from tests.python.graphed_world import Replaying, partitions_of

from .actions import ACTIONS, KNOWN
from .programs import Program

_CALLS = 40
_FIRST_ACTION = 7
# What is known not to be counted, by neither path: what was told to autograd before an operator sees it
# (tests/python/graph_attacks/test_counted_*.py).
_KNOWN = ("written",)
_SERVED_CALLS = serving.served_calls
found: collections.Counter[str] = collections.Counter()


class Differs(Exception):
    """What is served is not what it should be."""


def _never_served() -> Any:
    never = ({}, "a name that is not there", 0)
    return runtime.engine().served_calls(serving.inside, runtime._own, [never], None)


def _attempt(program: Program, i: int) -> Any:
    try:
        return program.call(i)
    except Exception as error:
        return f"raises {type(error).__name__}"


def _act(action: Any, program: Program) -> str:
    try:
        action(program)
    except Exception as error:
        return f"raises {type(error).__name__}: {str(error)[:60]}"
    return ""


def _versions(program: Program) -> dict[str, tuple[Any, int]]:
    """With references that keep nothing alive: another tensor may get a freed one's id."""
    counted = {}
    for k, t in program.tensors().items():
        with contextlib.suppress(RuntimeError):  # inference tensors have none
            counted[k] = weakref.ref(t), t._version
    return counted


def _moved(before: dict[str, Any], after: dict[str, Any]) -> dict[str, int]:
    """Of tensors that are still there."""
    return {
        k: version - before[k][1]
        for k, (of, version) in after.items()
        if k in before and before[k][0]() is of()
    }


def _is_same(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and (isinstance(a, torch.Tensor) or a == b)
    if (a.layout, a.dtype, a.shape, a.requires_grad) != (b.layout, b.dtype, b.shape, b.requires_grad):
        return False
    x, y = (t.detach().to_dense() if t.layout != torch.strided else t.detach() for t in (a, b))
    return torch.equal(torch.nan_to_num(x.resolve_conj()), torch.nan_to_num(y.resolve_conj()))


def run(seed: int, trace: list[str], every_action: bool = False) -> None:
    """Raises Differs."""
    serving.served_calls = _SERVED_CALLS
    programs = [Program(seed) for _ in range(3)]
    plain, engine, python = programs
    plain.run = plain.step
    engine.run = pygraph.graph(engine.step)
    serving.served_calls = _never_served
    python.run = pygraph.graph(python.step)
    trace.append(", ".join(part.__name__ for part in plain.parts))
    choose = random.Random(seed + 1)
    known = [*ACTIONS, *(KNOWN if every_action else ())]
    actions = choose.sample(known, choose.choice((1, 2, 4, 8, len(ACTIONS))))
    every = choose.choice((0.05, 0.15, 0.3))
    served = runtime.engine().take_served_count
    for i in range(_CALLS):
        if i >= _FIRST_ACTION and choose.random() < every:
            action = choose.choice(actions)
            failures = [_act(action, program) for program in programs]
            trace.append(f"{i}: {action.__name__} {failures[0]}")
            if len(set(failures)) > 1:
                raise Differs(f"{action.__name__}: {failures}")
        for program in programs:
            program.keep_finite()
        results, moved, replays = [], [], []
        for program in programs:
            before, count = _versions(program), sum(p.replays for p in Replaying.all)
            serving.served_calls = _SERVED_CALLS if program is engine else _never_served
            results.append(_attempt(program, i))
            moved.append(_moved(before, _versions(program)))
            replays.append(sum(p.replays for p in Replaying.all) - count)
        by_engine = served(engine.run._served)
        found["served"] += by_engine
        found["replayed by python"] += replays[2]
        trace.append(f"{i}: {results[0]!s:.60} {replays[1:]} {by_engine}")
        for name, program, result in zip(("engine", "python"), programs[1:], results[1:], strict=True):
            if not _is_same(results[0], result):
                raise Differs(f"call {i}, {name}: {result} for {results[0]}")
            ours, theirs = program.tensors(), plain.tensors()
            if ours.keys() != theirs.keys():
                raise Differs(f"call {i}, {name}: other tensors {ours.keys() ^ theirs.keys()}")
            for k in theirs:
                if not _is_same(theirs[k], ours[k]):
                    raise Differs(f"call {i}, {name}: {k} is {ours[k]} for {theirs[k]}")
        if replays[1] != replays[2]:
            raise Differs(f"call {i}: replays {replays[1]}, served {by_engine}, Python {replays[2]}")
        for name, ours in zip(("engine", "python"), moved[1:], strict=True):
            for k, by in moved[0].items():
                if by and not ours.get(k, 0) and any(of in k for of in _KNOWN):
                    found[f"known: the version of {k.split('.')[-1]} does not move"] += 1
                elif by and not ours.get(k, 0):
                    raise Differs(f"call {i}, {name}: the version of {k} has not moved")
                if not by and ours.get(k, 0):
                    found[f"version moves although it should not: {k.split('.')[-1]}"] += 1


@contextlib.contextmanager
def world() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "served_calls", _SERVED_CALLS)
        yield from partitions_of(lambda: frozen_world.install(patch))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--known", action="store_true", help="also what is known to fail")
    chosen = parser.parse_args()
    faulthandler.enable()
    warnings.simplefilter("ignore")
    logging.getLogger("pygraph").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    end, made, failed = time.monotonic() + chosen.seconds, 0, 0
    reasons: collections.Counter[str] = collections.Counter()
    for seed in range(chosen.seed, chosen.seed + chosen.count):
        if time.monotonic() > end:
            break
        made += 1
        if chosen.trace:
            print("seed", seed, flush=True)
        trace: list[str] = []
        with world():
            try:
                run(seed, trace, chosen.known)
            except Exception as error:
                failed += 1
                print(f"seed {seed}: {str(error)[:300]} | {trace[0]} | {trace[-3:]}", flush=True)
                if chosen.trace:
                    traceback.print_exc()
            reasons.update({row.reason for row in pygraph.stats() if row.reason})
        if chosen.trace:
            print("\n".join(trace))
        if made % 10 == 0:
            gc.collect()
    print(f"{made} programs, {failed} failed", dict(found))
    for reason, count in reasons.most_common(12):
        print(f"{count:6} {reason}")
    return min(failed, 1)


if __name__ == "__main__":
    raise SystemExit(main())
