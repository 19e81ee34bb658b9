"""Graphed callables without a GPU whose replays run no Python, as a graph's do.

As graphed_world.py, but a replay executes the operators that a rehearsal dispatched, with the numbers
that Python gave them then, on the memory of the call's inputs. A number that is an input is found in
the operators by its value, which no other has, and replaced by the call's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pygraph import runtime
from pygraph.callables import variant
from pygraph.callables.step_function import NotGraphable
from pygraph.gpu.clones import clone_shared_storages

from . import graphed_world
from .contexts import comparing, recorded
from .graphed_world import Replaying


class _Tape(TorchDispatchMode):
    """The operators of one rehearsal. A tensor is (kind, number, start, size, stride, ...)."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        super().__init__()
        self._numbers = {x: i for i, x in enumerate(inputs) if isinstance(x, float)}
        self.steps: list[tuple[Any, Any, Any, int]] = []
        self._starts = [
            (x.untyped_storage().data_ptr(), x.untyped_storage().nbytes(), i)
            for i, x in enumerate(inputs)
            if isinstance(x, torch.Tensor)
        ]
        self._born: dict[int, int] = {}
        self._alive: list[Any] = []
        self.templates: list[tuple[int, torch.dtype]] = []

    def _refer(self, x: Any) -> Any:
        if type(x) is float and x in self._numbers:
            return ("number", self._numbers[x], *[None] * 5)
        if not isinstance(x, torch.Tensor):
            return x
        pointer = x.untyped_storage().data_ptr()
        rest = (tuple(x.shape), tuple(x.stride()), x.dtype, x.storage_offset() * x.element_size())
        for start, size, i in self._starts:
            if size and start <= pointer < start + size:
                return ("in", i, pointer - start, *rest)
        if pointer in self._born:
            return ("born", self._born[pointer], 0, *rest)
        return ("constant", x, 0, *rest)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        refer = lambda x: pytree.tree_map(self._refer, x)  # noqa: E731
        given = (refer(args), refer(kwargs))
        out = func(*args, **kwargs)
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and self._refer(leaf)[0] == "constant":
                self._born[leaf.untyped_storage().data_ptr()] = len(self._born)
                self._alive.append(leaf.detach())  # its memory: so its address stays its own
        made = refer(out)
        self.steps.append((func, *given, made))
        return out

    def replay(self, inputs: Sequence[Any], outputs: Any) -> list[Any]:
        born: dict[int, torch.Tensor] = {}

        def is_reference(x: Any) -> bool:
            kinds = ("in", "born", "constant", "number")
            return isinstance(x, tuple) and len(x) == 7 and x[0] in kinds

        def take(x: Any) -> Any:
            if not is_reference(x):
                return x
            kind, which, start, size, stride, dtype, offset = x
            if kind == "constant":
                return which
            if kind == "number":
                return float(inputs[which])
            base = inputs[which] if kind == "in" else born[which]
            flat = torch.empty(0, dtype=torch.uint8).set_(base.untyped_storage())
            skip = start + offset
            length = torch.empty(0, dtype=dtype).element_size()
            view = flat[skip:]
            view = view[: view.numel() // length * length].view(dtype)
            return view.as_strided(size, stride)

        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for func, args, kwargs, made in self.steps:
                every = lambda x: pytree.tree_map(take, x, is_leaf=is_reference)  # noqa: E731
                out = func(*every(args), **every(kwargs))
                for leaf, reference in zip(
                    pytree.tree_leaves(out),
                    pytree.tree_leaves(made, is_leaf=is_reference),
                    strict=True,
                ):
                    if is_reference(reference) and reference[0] == "born" and reference[1] not in born:
                        born[reference[1]] = leaf
            return [take(x) for x in outputs]


def with_other_numbers(inputs: Sequence[Any]) -> list[Any]:
    """As a recording is given (bindings/tensors/followed_number.h)."""
    number = runtime.engine().FollowedNumber
    return [number(0.25 + (i + 1) / 3e6) if isinstance(x, float) else x for i, x in enumerate(inputs)]


class Frozen(Replaying):
    """A partition whose replays have the numbers of the recording."""

    is_refused = False

    def callable(self, inputs: list[Any]) -> Sequence[Any]:
        self.calls += 1
        if self.calls == 1 or self.is_refused:
            return self.function(inputs)
        if self.calls > 2:
            self.replays += 1
            given = list(inputs)
            inputs.clear()
            if self.calls <= 4:  # compared calls: Python runs
                before = clone_shared_storages(given, list(range(len(given))))
                replayed = self.tape.replay(before, self.outputs)
                with comparing():
                    outputs = self.function(list(given))
                graphed_world.assert_equal([*outputs, *given], [*replayed, *before])
                return outputs
            return self.tape.replay(given, self.outputs)
        every = range(len(inputs))
        stand_ins = with_other_numbers(clone_shared_storages(inputs, list(every)))
        self.tape = _Tape(stand_ins)
        try:
            with recorded(0):
                self.function.rehearse(clone_shared_storages(inputs, list(every)))
            with recorded(1), self.tape:
                outputs = self.function.rehearse(stand_ins)
        except NotGraphable as error:
            self.is_refused = True
            self.entries[b""].refuse(str(error), 0)
            return self.function(inputs)
        self.outputs = [self.tape._refer(x) for x in outputs]
        before = clone_shared_storages(inputs, list(every))
        replayed = self.tape.replay(before, self.outputs)
        return self.verify(inputs, before, replayed)


def install(monkeypatch: pytest.MonkeyPatch) -> type[Replaying]:
    graphed_world.install(monkeypatch)
    monkeypatch.setattr(variant, "Partition", Frozen)
    return Replaying
