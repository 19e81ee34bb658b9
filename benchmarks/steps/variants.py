"""The variants of a training step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import pygraph
from benchmarks.steps.program import Batch, Program, Setting, StepWorkload
from pygraph.options import Options

_OPTIMIZERS = "optimizers"  # the option by which plain loops have graphs of their optimizers
PIECES = "pygraph, pieces"
GRAPHED = ("pygraph.graph eager", "pygraph.graph")
BRANCHES = ("pygraph.graph eager, branches", "pygraph.graph, branches")
HAND_MADE = ("hand-made eager", "hand-made")
VARIANTS = (
    *("eager", "inductor", "inductor+graphs", "pygraph", PIECES),
    *(*GRAPHED, *BRANCHES, *HAND_MADE),
)
_LANES = 8  # of the variants with branches, as the backend's default
_GRAPH_WARM_UP = 3  # uncaptured steps before a capture by hand


def has_pieces() -> bool:
    """Whether this version has the option."""
    return any(field.name == _OPTIMIZERS for field in dataclasses.fields(Options))


def names_for(wanted: Sequence[str]) -> list[str]:
    """Those of the wanted ones that this version has. Graphs made by hand come last: they may hold the
    workspace that cuBLAS has on their stream, which others free."""
    names = [name for name in wanted if name not in HAND_MADE and (name != PIECES or has_pieces())]
    return names + [name for name in HAND_MADE if name in wanted]


def _pygraph_options(pieces: bool) -> dict[str, Any]:
    """So that the two variants of a plain loop differ, whichever is the option's default."""
    field = next((f for f in dataclasses.fields(Options) if f.name == _OPTIMIZERS), None)
    if field is None:
        return {}
    words = {True: "auto", False: "off"}
    value = words[pieces] if isinstance(field.default, str) else pieces
    return {f"pygraph.{_OPTIMIZERS}": value}


def _eager(module: nn.Module) -> Callable[..., Any]:
    return module


def _compile(name: str) -> Callable[[nn.Module], Callable[..., Any]]:
    """What the variant makes of a module. The model inside of a graph is compiled by Inductor: its
    kernels become nodes of the one graph, and it needs no graphs of its own."""
    if name in ("inductor", "pygraph.graph", "pygraph.graph, branches", "hand-made"):
        return torch.compile
    if name == "inductor+graphs":
        return lambda module: torch.compile(module, mode="reduce-overhead")
    if name in ("pygraph", PIECES):
        options = _pygraph_options(name == PIECES)
        return lambda module: torch.compile(module, backend="pygraph", options=options)
    return _eager


class Variant:
    """A program, and one way to make its step. program: built from a fixed seed."""

    def __init__(self, name: str, workload: StepWorkload, device: str) -> None:
        self.name = name
        self.workload = workload
        torch.manual_seed(0)
        setting = Setting(device, _compile(name), capturable=name in HAND_MADE)
        self.program: Program = workload.build(setting)
        # On the CPU, as device memory is measured.
        self.initial = [tensor.detach().cpu().clone() for tensor in self.program.tensors()]
        self._step = self.program.step
        if name in GRAPHED:
            self._step = pygraph.graph(self.program.step)
        if name in BRANCHES:
            self._step = pygraph.graph(self.program.step, lanes=_LANES)

    def step(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        if self.name == "inductor+graphs":
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return self._step(*batch)


class HandMade(Variant):
    """torch.cuda.graph around the step: batches are copied into fixed tensors, and losses stay where
    they are."""

    def __init__(self, name: str, workload: StepWorkload, device: str, batch: Batch) -> None:
        super().__init__(name, workload, device)
        self._batch = [tensor.clone() for tensor in batch]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_GRAPH_WARM_UP):
                self.program.step(*self._batch)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self._losses = self.program.step(*self._batch)

    def step(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        for fixed, tensor in zip(self._batch, batch, strict=True):
            fixed.copy_(tensor)
        self._graph.replay()
        return self._losses


def make(name: str, workload: StepWorkload, device: str, batch: Batch) -> Variant:
    """The variant of this name; no step is made yet, but for a graph made by hand."""
    if name in HAND_MADE:
        return HandMade(name, workload, device, batch)
    return Variant(name, workload, device)
