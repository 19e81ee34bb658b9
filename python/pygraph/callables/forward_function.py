"""A callable inside of a differentiated program, as a function of tensors (step_function.py).

Its outputs are the results, detached, and the memory that autograd saves (saved_tensors.py). Results
that require gradients get one node in the program's graph (graphed_gradient.py). There are three ways
to run it:

    as it is     the callable is called, with autograd's own graph: first calls, trials, refusals
    compared     the callable is called on detached arguments. Its outputs are compared with a replay's;
                 its graph is kept, and the results get the one node, as those of a replay do
    a rehearsal  the same on other tensors, while recording or verifying. Its graph is kept only if
                 nothing but autograd's saved tensors refers to the arguments afterwards
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pygraph import runtime
from pygraph.callables import kept_graph
from pygraph.callables.argument_aliases import alias_of, is_held, moved_onto, users_of
from pygraph.callables.backward_function import Backwards
from pygraph.callables.graphed_gradient import Made, with_gradient
from pygraph.callables.host.kinds import is_of
from pygraph.callables.inference_results import as_observed
from pygraph.callables.kept_graph import Structure
from pygraph.callables.observation import Form
from pygraph.callables.saved_tensors import (
    ARGUMENT,
    IN_ARGUMENT,
    IN_STATE,
    STATE,
    Saved,
    SavedTensors,
    address_of,
    take_out,
)
from pygraph.callables.signature import Arguments, put_together
from pygraph.callables.step_function import NotGraphable, StepFunction
from pygraph.callables.surroundings import Surroundings
from pygraph.undoing import Undo, undoing

_OTHER = "it returns or saves another structure than it did before"


class ForwardFunction(StepFunction):
    """refusal: why its calls run as they are from now on; empty while they need not. structures: by
    layout of the arguments. written: numbers of storages of the state that it writes."""

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Arguments,
        around: Surroundings,
        form: Form,
        backwards: Backwards,
    ) -> None:
        super().__init__(function, arguments, around, form)
        self.refusal = ""
        self.structures: dict[Any, Structure] = {}
        self.written = frozenset(around.state.written)
        self._backwards = backwards
        backwards.refuse = self.refuse
        self._parameters = [t for t in around.tensors if t.requires_grad and t.is_leaf]
        self._requires_grad = [tensor.requires_grad for tensor in arguments.tensors]
        self._differentiable = [i for i, flag in enumerate(self._requires_grad) if flag]
        # Made now, because a recording must not keep what it allocates.
        needing = [*self._parameters, *(t for t in arguments.tensors if t.requires_grad)]
        self._atoms = {t.dtype: torch.zeros((), dtype=t.dtype, device=around.device) for t in needing}

    def _result(self, outputs: Any) -> Any:
        structure = self._call.structure
        if structure is None:
            structure = self.structures[self._key(self._call.arguments.tensors)]
        count = len(self._form.kinds)
        leaves = self._attach(structure, list(outputs[:count]), outputs[count:])
        arguments = self._call.arguments.tensors
        return self._unflatten(as_observed(leaves, self._form.inference, arguments))

    # The three ways.

    def _make_call(self) -> tuple[Any, ...]:
        arguments = self._call.arguments.tensors
        expected = self.structures.get(self._key(arguments)) if runtime.is_compared() else None
        if expected is None:
            leaves, spec = pytree.tree_flatten(self._call.make())
            leaves = self._detached(leaves)
            self._call.result = (pytree.tree_unflatten(leaves, spec),)
            return tuple(leaves)
        detached = [t.detach() if t.requires_grad else t for t in arguments]
        saved, ends = SavedTensors(), self._ends(detached, arguments)

        def body(undo: Undo) -> Any:
            undo.append(torch.clear_autocast_cache)
            torch.clear_autocast_cache()
            saved.begin_saving(undo)
            args, kwargs = put_together(self._example, detached)
            return self._function(*args, **kwargs)

        leaves, spec = pytree.tree_flatten(undoing(body))
        leaves = moved_onto(self._detached(leaves), detached, arguments)
        try:
            outputs = self._kept(expected, leaves, spec, ends, detached, saved)
            self._call.structure = expected
            return outputs
        except NotGraphable as error:  # the call is made
            self.refuse(str(error))
            return self._as_it_was_made(leaves, spec, ends)

    def _run(self, given: list[Any]) -> tuple[Any, ...]:
        arguments = given[: self._tensor_count]
        key = self._key(arguments)
        aliases = [alias_of(tensor) for tensor in arguments]
        memory = [runtime.engine().flat_tensor(alias) for alias in aliases]
        saved, ends = SavedTensors(), self._ends(aliases, aliases)
        numbers = len(given) - self._around.numbers.count
        rates = given[numbers - len(self._around.followed) : numbers]
        users = users_of(rates)
        fresh = runtime.engine().FreshAccumulators(self._parameters)
        try:
            leaves, spec = pytree.tree_flatten(undoing(functools.partial(self._save, aliases, saved)))
            leaves = self._detached(leaves)
            outputs = self._kept(None, leaves, spec, ends, aliases, saved, key)
            outputs = tuple(moved_onto(outputs, aliases, arguments))
        finally:
            fresh.undo()
        del aliases, leaves, saved
        keeps_rates = self.structures[key].python and users_of(rates) != users
        if keeps_rates or any(is_held(flat) for flat in memory):
            self.structures.pop(key, None)
            raise NotGraphable("it keeps a tensor for its backward beside what autograd saves")
        return outputs

    def _save(self, aliases: list[torch.Tensor], saved: SavedTensors, undo: Undo) -> Any:
        """Calls the callable. What autograd saves is put into ``saved``."""
        undo.append(functools.partial(torch._C._set_grad_enabled, torch.is_grad_enabled()))
        torch._C._set_grad_enabled(True)
        saved.begin_saving(undo, is_rehearsal=True)
        args, kwargs = put_together(self._example, aliases)
        return self._function(*args, **kwargs)

    def refuse(self, reason: str) -> None:
        """Calls run as they are from now on."""
        if not self.refusal:
            self.refusal = reason
            runtime.note(logging.WARNING, "%s stays uncaptured: %s", self._backwards.name, reason)

    # What a run leaves.

    def _kept(
        self,
        expected: Structure | None,
        leaves: list[Any],
        spec: Any,
        ends: list[torch.Tensor],
        arguments: Sequence[torch.Tensor],
        saved: SavedTensors,
        key: Any = None,
    ) -> tuple[Any, ...]:
        """Keeps the graph of a run, and returns its outputs. expected: None in a rehearsal. Raises
        NotGraphable; the graph is whole then."""
        self._check_form(leaves, spec)
        device = self._around.device
        self._check_results(leaves, arguments)
        handles = saved.handles()
        if saved.leaves_hooks:
            raise NotGraphable("it leaves hooks for saved tensors open")
        before = expected if expected is not None else self.structures.get(key)
        known = before.places if before is not None else ()
        owners = self._backwards.owners
        found = take_out(handles, arguments, self.state_tensors, owners, device, known)
        structure = kept_graph.survey(leaves, ends, found)
        structure.python |= saved.recomputes
        if structure.python:
            self._around.numbers.note_python_in_backward()
        if before is not None and before != structure:
            raise NotGraphable(_OTHER)
        if before is None:
            before = self.structures[key] = structure
        before.on_host.update(i for i, flat in enumerate(found.made) if flat.device != device)
        self._keep(before, leaves, ends, found)
        outputs = (*_without_graph(leaves), *found.made)
        for number, handle in enumerate(handles):
            handle.tensor, handle.number = None, number
        return outputs

    def _keep(
        self, structure: Structure, leaves: list[Any], ends: list[torch.Tensor], found: Saved
    ) -> None:
        stream = kept_graph.stream_of(self._around.device)
        arguments = len(self._differentiable)
        instead = [ends[i] if i < arguments else self._leaf(ends[i]) for i in structure.ends]
        kept_graph.keep(structure, leaves, ends, instead, found.constants, stream)

    def _as_it_was_made(
        self, leaves: list[Any], spec: Any, ends: list[torch.Tensor]
    ) -> tuple[Any, ...]:
        """For results whose graph cannot be kept: it serves this call alone, with what it has saved."""
        places = Saved([], [], {})
        results = [leaf for leaf in leaves if is_of(leaf, torch.Tensor) and leaf.requires_grad]
        reached = runtime.engine().survey_graph(results, ends)[0]
        positions = [i for i, x in enumerate(leaves) if any(x is result for result in results)]
        structure = Structure([], 0, list(reached), positions, {}, {}, [], True, is_lasting=False)
        self._keep(structure, leaves, ends, places)
        attached = self._attach(structure, _without_graph(leaves), ())
        self._call.result = (pytree.tree_unflatten(attached, spec),)
        return tuple(attached)

    def _attach(self, structure: Structure, leaves: list[Any], made: Sequence[Any]) -> list[Any]:
        """Gives results their node in the program's graph."""
        arguments = self._call.arguments.tensors
        sources = [*(arguments[i] for i in self._differentiable), *self._parameters]
        # Autograd is to notice where the program writes to what the backward needs.
        watched = [leaves[i] for i in structure.checked]
        owners = self._backwards.owners
        places = [p for p in structure.places if p.kind in (STATE, IN_STATE)]
        saved = sorted({(p.number, p.owner) for p in places if p.number not in self.written})
        watched += [owners[i][n] for i, n in saved if i in owners]
        results = with_gradient(
            Made(
                structure=structure,
                backwards=self._backwards,
                results=[leaves[i] for i in structure.results],
                made=list(made),
                arguments=[
                    *(arguments[i] for i in structure.of_kind(ARGUMENT)),
                    *(arguments[i].detach() for i in structure.of_kind(IN_ARGUMENT)),
                ],
                watched=watched,
            ),
            [sources[i] for i in structure.ends],
        )
        for i, result in zip(structure.results, results, strict=True):
            leaves[i] = result
        for i, (base, layout) in structure.shared.items():
            leaves[i] = leaves[base].detach().as_strided(*layout)
        for i, first in structure.repeated.items():
            leaves[i] = leaves[first]
        return leaves

    # Arguments.

    def _key(self, arguments: Sequence[Any]) -> Any:
        """Equal for calls that run the same operators: PyTorch's switches and the layouts."""
        switches = runtime.engine().signature([], self._around.device.index or 0)
        return switches, tuple((t.shape, t.stride(), t.dtype) for t in arguments)

    def _ends(self, given: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Makes gradients of the given arguments flow to leaves. Returns what gradients of a run could
        flow to: these leaves, and parameters."""
        leaves = [self._leaf(like[i]) for i in self._differentiable]
        for i, leaf in zip(self._differentiable, leaves, strict=True):
            runtime.engine().lead_gradients(given[i], leaf)
        return [*leaves, *self._parameters]

    def _leaf(self, like: torch.Tensor) -> torch.Tensor:
        """Without memory of its own, so that a kept graph may hold it."""
        return self._atoms[like.dtype].expand(like.shape).detach().requires_grad_()

    def _check_results(self, leaves: list[Any], arguments: Sequence[torch.Tensor]) -> None:
        theirs = {address_of(t) for t in (*arguments, *self.state_tensors)} - {0}
        for leaf in leaves:
            if is_of(leaf, torch.Tensor) and leaf.requires_grad and address_of(leaf) in theirs:
                raise NotGraphable("a result that requires a gradient lies in what it is given")


def _without_graph(leaves: list[Any]) -> list[Any]:
    """The results without their graph; one that is there twice is there twice again."""
    known: dict[int, Any] = {}
    for leaf in leaves:
        if is_of(leaf, torch.Tensor) and leaf.requires_grad:
            known[id(leaf)] = leaf.data  # not detach(): that is a view, to which nobody may write
    return [known.get(id(leaf), leaf) for leaf in leaves]
