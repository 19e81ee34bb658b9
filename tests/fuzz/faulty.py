"""Graphs that are wrong on purpose: what the fuzzer must find. For tests of the fuzzer itself."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import torch

from .partition_level import Function
from .program import Program

FAULTS = ("stale", "twice", "unwritten", "shared", "draws", "raises", "crashes", "hangs", "leaves")


class Faulty:
    """Right in the first two calls, as a graph that was recorded wrongly would be."""

    def __init__(self, function: Function, fault: str) -> None:
        self._function = function
        self._fault = fault
        self._calls = 0
        self._first: list[Any] = []
        self._held: list[Any] = []

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        self._calls += 1
        is_first = not self._first
        if self._calls <= 2:
            results = list(self._function(args))
            if is_first:
                self._first = [r.clone() if isinstance(r, torch.Tensor) else r for r in results]
            return results
        return self._replay(args)

    def _replay(self, args: list[Any]) -> Sequence[Any]:
        fault = self._fault
        if fault == "crashes":
            os.abort()
        if fault == "hangs":
            time.sleep(3600)
        if fault == "raises":
            raise RuntimeError("a replay's error")
        if fault == "twice":
            self._function(list(args))
        if fault == "draws":
            torch.rand(1)
        if fault == "unwritten":
            args[:] = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        results = list(self._function(args))
        if fault == "leaves":
            self._held += results
        if fault == "stale" and len(self._first) == len(results):
            return [
                old.clone() if _fits(old, new) else new
                for old, new in zip(self._first, results, strict=True)
            ]
        if fault == "shared":
            results = [r.clone() if isinstance(r, torch.Tensor) else r for r in results]
        return results


def _fits(old: Any, new: Any) -> bool:
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return False
    return old.shape == new.shape and old.stride() == new.stride() and old.dtype == new.dtype


def wrap(fault: str) -> Any:
    """What makes graphs with the fault, for :func:`tests.fuzz.check.check`."""

    def make(program: Program, function: Function, number: int, device: str) -> Function:
        return Faulty(function, fault)

    return make
