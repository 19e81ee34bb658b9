"""A callable as a function of tensors alone, which can be recorded, verified and replayed.

Its inputs are a flat list: the tensors that are passed, flat tensors that cover the state, gradients
from before that the callable uses, learning rates, and numbers of fused optimizers. Its outputs are the
tensors that it returns, and the gradients that it leaves. It runs in two ways:

    the call     on the program's own tensors: the callable is called, and nothing else happens
    a rehearsal  on other tensors (stand-ins while recording, clones while verifying): the memory under
                 the state is exchanged for that of the given tensors, the callable is called, and
                 everything on the host is put back: memory, gradients, attributes
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pygraph import runtime, signal_exceptions
from pygraph.callables import serving
from pygraph.callables.host.kinds import is_of
from pygraph.callables.host.random_states import SEEDS
from pygraph.callables.host.user_code import line_of
from pygraph.callables.inference_results import as_observed
from pygraph.callables.known_call import OfStep
from pygraph.callables.observation import Form, fate, kinds_of
from pygraph.callables.observed_call import run_backwards_here
from pygraph.callables.rates import begin_recording
from pygraph.callables.results import unfit_result
from pygraph.callables.signature import Arguments, put_together, unflattener
from pygraph.callables.surroundings import Surroundings
from pygraph.undoing import Undo, undoing


class NotGraphable(RuntimeError):
    """What a callable does or returns keeps it from having a graph; the text says why."""


class StepFunction:
    """Thread-safe as long as calls are: docs/explanation/whole-steps.md, "Threads"."""

    def __init__(
        self, function: Callable[..., Any], arguments: Arguments, around: Surroundings, form: Form
    ) -> None:
        self._function = function
        self._around = around
        self._form = form
        self._tensor_count = len(arguments.tensors)
        self.state_tensors = list(around.state.tensors())  # the same ones in each call
        self._unflatten = unflattener(form.spec)
        # Of the call under way: `arguments`, `rest`, `make`; `result`, if the callable has made it;
        # `structure`, if the callable has made it to be compared (ForwardFunction).
        self._call = threading.local()
        # For rehearsals: without the tensors of the call that it was made in.
        self._example = dataclasses.replace(
            arguments,
            leaves=[torch.empty(0) if is_of(x, torch.Tensor) else x for x in arguments.leaves],
            tensors=[],
        )

    @property
    def state_positions(self) -> range:
        return range(self._tensor_count, self._tensor_count + len(self.state_tensors))

    def inputs(self, arguments: Arguments) -> list[Any]:
        return [*arguments.tensors, *self.state_tensors, *self._rest()]

    def _rest(self) -> list[Any]:
        """Inputs that may be others at each call: gradients from before, rates, numbers."""
        around = self._around
        numbers: list[Any] = [*around.rates.tensors(), *around.numbers.inputs()]
        gradients = around.used_gradients()  # which may be views of larger memory
        return [*runtime.engine().flat_tensors(gradients), *numbers] if gradients else numbers

    def call(
        self,
        graphed: Callable[[list[Any]], Any],
        arguments: Arguments,
        make: Callable[[], Any],
        tell_replayed: Callable[[Arguments], None],
    ) -> Any:
        """Makes one call by ``graphed``, the partition's callable. Returns its result. make: makes the
        call uncaptured. tell_replayed: is told where the callable itself has not made it."""
        own, rest = self._call, self._rest()
        own.was_replayed = False
        made: dict[int, Any] = {}
        try:
            own.arguments, own.rest, own.make = arguments, rest, make
            own.result = own.structure = None
            inputs = [*arguments.tensors, *self.state_tensors, *rest]
            # Not a call of its own: an interrupt right after a replay must find what it has made.
            made = collections.defaultdict(functools.partial(graphed, inputs))
            outputs = made[0]
            if own.result is not None:
                return own.result[0]
            own.was_replayed = self._is_replayed
            if own.was_replayed:
                tell_replayed(arguments)
            self._leave_gradients(outputs)
            return self._result(outputs)
        except BaseException:
            if made and own.result is None:
                if self._is_replayed:
                    tell_replayed(arguments)
                self._leave_gradients(made[0])
            raise
        finally:
            serving.inside.is_made = bool(made)
            own.arguments = own.rest = own.make = own.result = own.structure = None

    @property
    def was_replayed(self) -> bool:
        """Whether a replay has made the last call of this thread."""
        return getattr(self._call, "was_replayed", False)

    @property
    def _is_replayed(self) -> bool:
        """Whether a replay has made the call under way, and not the callable itself."""
        return self._call.result is None and self._call.structure is None

    def _is_the_call(self, given: list[Any]) -> bool:
        """Whether these are the inputs of the call under way, which tells it from a rehearsal."""
        arguments = getattr(self._call, "arguments", None)
        if arguments is None:
            return False
        own = [*arguments.tensors, *self.state_tensors, *self._call.rest]
        return all(a is b for a, b in zip(given, own, strict=True))

    def _leave_gradients(self, outputs: Any) -> None:
        """Of a replay."""
        around = self._around
        if around.made:
            runtime.engine().set_gradients(around.made, outputs, len(self._form.kinds))
        if around.cleared:
            runtime.engine().clear_gradients(around.cleared)

    def _result(self, outputs: Any) -> Any:
        """Of a replay."""
        return self._result_of(outputs[: len(self._form.kinds)], self._call.arguments.tensors)

    def _result_of(self, leaves: Any, arguments: list[torch.Tensor]) -> Any:
        return self._unflatten(as_observed(leaves, self._form.inference, arguments))

    def known_call(self) -> OfStep:
        around, form = self._around, self._form
        is_one = form.spec.num_nodes == 1 and form.spec.num_leaves == 1
        result_of: Any = None if is_one else self._unflatten
        if form.inference or torch.is_inference_mode_enabled() or result_of not in (None, tuple, list):
            result_of = self._result_of
        return {
            "state": around.state,
            "differentiated": around.tensors,
            "used": around.used,
            "groups": around.rates.groups,
            "make_rates": around.rates.tensors_now,
            "state_tensors": self.state_tensors,
            "made": around.made,
            "cleared": around.cleared,
            "result_of": result_of,
            "result_count": len(form.kinds),
        }

    def __call__(self, inputs: list[Any]) -> tuple[Any, ...]:
        """Consumes the list, as compiled functions do."""
        given = list(inputs)
        inputs.clear()
        return self._make_call() if self._is_the_call(given) else self.rehearse(given)

    def _make_call(self) -> tuple[Any, ...]:
        result = self._call.make()
        leaves, spec = pytree.tree_flatten(result)
        if self._form.detached:
            leaves = self._detached(leaves)
            result = pytree.tree_unflatten(leaves, spec)
        self._call.result = (result,)
        return self._outputs(leaves)

    def _run(self, given: list[Any]) -> tuple[Any, ...]:
        """On other tensors than the call's."""
        args, kwargs = put_together(self._example, given[: self._tensor_count])
        leaves, spec = pytree.tree_flatten(self._function(*args, **kwargs))
        leaves = self._detached(leaves)
        self._check_form(leaves, spec)
        if any(is_of(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
            raise NotGraphable("a result requires a gradient, which none did before")
        return self._outputs(leaves)

    def _check_form(self, leaves: list[Any], spec: Any) -> None:
        failure = unfit_result(leaves)
        if spec != self._form.spec or kinds_of(leaves) != self._form.kinds:
            failure = "it returns another structure than it did before"
        if failure:
            if float in self._form.kinds:  # it may be a learning rate
                self._around.note_kept()
            raise NotGraphable(failure)

    def _detached(self, leaves: list[Any]) -> list[Any]:
        positions = self._form.detached
        return [leaf.detach() if i in positions else leaf for i, leaf in enumerate(leaves)]

    def _outputs(self, leaves: list[Any]) -> tuple[Any, ...]:
        return (*leaves, *[tensor.grad for tensor in self._around.made])

    def rehearse(self, given: list[Any]) -> tuple[Any, ...]:
        """Runs the callable on other tensors, and undoes on the host what it did."""
        left: list[str] = []
        outputs = undoing(lambda undo: self._rehearse(given, left, undo))
        if left:  # a replay would not
            self._around.note_kept()
            raise NotGraphable(f"it keeps a learning rate, or what follows from one, as {left[0]}")
        return outputs

    def _rehearse(self, given: list[Any], left: list[str], undo: Undo) -> tuple[Any, ...]:
        """left: gets the places where the callable has left numbers or tensors that are new."""
        around = self._around
        own = [*self.state_tensors, *runtime.engine().flat_tensors(around.used_gradients())]
        first, end = self._tensor_count, self._tensor_count + len(own)
        kept = [(gradient.tensor, gradient.tensor.grad) for gradient in around.gradients]
        runtime.begin_capturing(undo)
        run_backwards_here(undo)
        undo.append(functools.partial(torch._C._set_grad_enabled, torch.is_grad_enabled()))
        undo.append(functools.partial(around.put_back, kept, left))
        numbers = end + len(around.followed)
        begin_recording(around.fused, around.followed, given[end:numbers], undo)
        are_left_alone = around.numbers.begin_recording(given[numbers:], undo)
        exchange = runtime.engine().StorageExchange(own, given[first:end])
        undo.append(exchange.undo)
        undo.append(torch.clear_autocast_cache)
        torch.clear_autocast_cache()
        has_seeded = around.begin_to_look_for_seeds(undo)
        try:
            outputs = self._run(given)
            if has_seeded():
                raise NotGraphable(SEEDS)
            self._check_gradients(kept)
            around.rates.note_set(given[end:numbers])
            if around.rates.are_kept:
                raise NotGraphable("it keeps a learning rate, or what follows from one, as another one")
            if not are_left_alone():
                raise NotGraphable("its Python reads or sets numbers of an optimizer that move")
            return outputs
        except (torch.OutOfMemoryError, NotGraphable):
            raise
        except Exception as error:
            if signal_exceptions.raised_by_handler(error) is None:
                around.numbers.note_failure()
            line = line_of(error)
            if not line:
                raise
            raise RuntimeError(f"{runtime.first_line(error)}{line}") from error

    def _check_gradients(self, kept: list[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        """Raises NotGraphable if the callable leaves other gradients than it did when it was observed,
        which a replay would not do."""
        for gradient, (tensor, old) in zip(self._around.gradients, kept, strict=True):
            if fate(old, tensor.grad) != gradient.after:
                raise NotGraphable("it leaves gradients to other tensors than before")
