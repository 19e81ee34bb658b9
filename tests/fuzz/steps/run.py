"""Runs random training loops: ``python -m tests.fuzz.steps.run --seed 0 --count 1000``."""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import logging
import os
import random
import time
import traceback
import warnings
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import pygraph
from tests.python import gradient_world
from tests.python.graphed_world import Replaying, partitions_of

from .actions import ACTIONS
from .loops import Loop

_CALLS = 34
_FIRST_ACTION = 3


class Differs(Exception):
    """The graphed loop is not the plain one."""


def _attempt(loop: Loop) -> Any:
    try:
        return loop.call()
    except Exception as error:
        if "PYGRAPH_TRACE" in os.environ:
            traceback.print_exc()
        return f"raises {type(error).__name__}"


def _compare(what: str, plain: Any, graphed: Any) -> None:
    ours, theirs = pytree.tree_flatten(graphed), pytree.tree_flatten(plain)
    if ours[1] != theirs[1]:
        raise Differs(f"{what}: {graphed} for {plain}")
    for i, (a, b) in enumerate(zip(ours[0], theirs[0], strict=True)):
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            is_same = (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride()) and (
                torch.equal(a.detach().nan_to_num(), b.detach().nan_to_num())
            )
        else:
            is_same = type(a) is type(b) and a == b
        if not is_same:
            raise Differs(f"{what} {i}: {a} for {b}")
    if _sharing(ours[0]) != _sharing(theirs[0]):
        raise Differs(f"{what}: other tensors share memory")


def _sharing(leaves: list[Any]) -> list[int]:
    """For each tensor, the first one in the same memory."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.numel() > 0]
    first: dict[int, int] = {}
    return [first.setdefault(t.untyped_storage().data_ptr(), i) for i, t in enumerate(tensors)]


def run_loop(seed: int, trace: list[str] | None = None) -> int:
    """Raises Differs. Returns the number of replays."""
    steps = [] if trace is None else trace
    plain, graphed = Loop(seed, lambda function: function), Loop(seed, pygraph.graph)
    choose = random.Random(seed + 1)
    chosen = choose.sample(ACTIONS, choose.choice((0, 1, 2, 4, len(ACTIONS))))
    every = choose.choice((0.1, 0.3, 0.6))
    held: list[Any] = []
    for i in range(_CALLS):
        if i >= _FIRST_ACTION and chosen and choose.random() < every:
            act = choose.choice(chosen)
            steps.append(f"{i}: {act.__name__}")
            for loop in (plain, graphed):
                swap = _globals_of(loop)
                with swap:
                    act(loop)
        results = []
        for loop in (plain, graphed):
            with _globals_of(loop):
                results.append(_attempt(loop))
        steps.append(f"{i}: {results[0]}")
        _compare(f"result of call {i},", *results)
        _compare(f"after call {i},", [results[0], *plain.seen()], [results[1], *graphed.seen()])
        # Fused optimizers and batch norm do not count what they write; replays of them do.
        if any(a > b for a, b in zip(plain.written(), graphed.written(), strict=True)):
            raise Differs(f"after call {i}: a write is not counted")
        if i % 3 == 0:
            held.append((results, pytree.tree_map(_copied, results)))
    for results, copies in held[-3:]:
        if plain.of.returns not in ("state",) and plain.kind == "step":
            _compare("a kept result", copies[1], pytree.tree_map(_copied, results[1]))
    return sum(partition.replays for partition in Replaying.all)


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


@contextlib.contextmanager
def _globals_of(loop: Loop) -> Any:
    """Each of the two has global variables of its own."""
    from . import loops, models

    own = getattr(loop, "_own", ({"smoothing": 0.0}, 1.0))
    loops.SETTINGS.update(own[0])
    models.Scale.factor = own[1]
    yield
    loop._own = (dict(loops.SETTINGS), models.Scale.factor)  # type: ignore[attr-defined]


@contextlib.contextmanager
def world() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        yield from partitions_of(lambda: gradient_world.install(patch))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--trace", action="store_true")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("pygraph").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    end, failed, with_replays, replays, made = time.monotonic() + chosen.seconds, 0, 0, 0, 0
    reasons: collections.Counter[str] = collections.Counter()
    for seed in range(chosen.seed, chosen.seed + chosen.count):
        if time.monotonic() > end:
            break
        made += 1
        trace: list[str] = []
        with world():
            try:
                found = run_loop(seed, trace)
                replays, with_replays = replays + found, with_replays + (found > 0)
            except Exception as error:
                failed += 1
                print(f"seed {seed}: {str(error)[:600]}", flush=True)
                if chosen.trace:
                    traceback.print_exc()
            reasons.update({row.reason for row in pygraph.stats() if row.reason})
            if chosen.trace:
                print("\n".join(trace), [row.reason for row in pygraph.stats() if row.reason])
        if made % 20 == 0:
            gc.collect()
        if made % 100 == 0:
            print(f"{made} loops, {with_replays} with replays, {failed} failed", flush=True)
    print(f"{made} loops, {with_replays} with replays, {replays} replays, {failed} failed")
    for reason, count in reasons.most_common(12):
        print(f"{count:6} {reason}")
    return min(failed, 1)


if __name__ == "__main__":
    raise SystemExit(main())
