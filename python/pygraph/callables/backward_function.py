"""The backward of a graphed callable: partitions of their own, one for each pattern of gradients.

    inputs     memory that the forward saved; arguments, and the state, as far as they are saved;
               gradients of the results
    outputs    gradients of the arguments and parameters that need one, None where nothing flows

The function runs the kept graph (kept_graph.py), in a recording and in an uncaptured run alike. Where
Python runs in the backward, the host is compared as in the forward (docs/explanation/whole-steps.md).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pygraph import runtime, signal_exceptions
from pygraph.callables import kept_graph
from pygraph.callables.host.random_states import SEEDS, random_state
from pygraph.callables.host.schedulers import SchedulerUse, watch_schedulers
from pygraph.callables.kept_graph import Structure
from pygraph.callables.rates import without_rates
from pygraph.callables.saved_tensors import ARGUMENT, IN_ARGUMENT, IN_STATE, MADE, STATE
from pygraph.callables.surroundings import Surroundings
from pygraph.options import Options
from pygraph.partition.partition import Partition
from pygraph.partition.signature import PartitionInfo
from pygraph.undoing import Undo, undoing

_COMPARED_CALLS = 2  # as of the forward (variant.py)
_MOST_PATTERNS = 16  # of gradients, for one structure

# Which results have gradients, which ends need one.
_Pattern = tuple[tuple[bool, ...], tuple[bool, ...]]


class BackwardFunction:
    """Of one structure and pattern. Thread-safe as StepFunction is."""

    def __init__(self, structure: Structure, around: Surroundings, pattern: _Pattern) -> None:
        self._structure = structure
        self._around = around
        self._has_gradient, self._needed = pattern
        self._arguments = structure.of_kind(ARGUMENT), structure.of_kind(IN_ARGUMENT)
        # Python may use any of the state.
        every = range(len(around.state.tensors()))
        self._state = list(every) if structure.python else structure.of_kind(STATE, IN_STATE)
        self._call = threading.local()  # `state` and `exchanged` of the call under way

    @property
    def state_positions(self) -> range:
        first = self._structure.made + sum(map(len, self._arguments))
        return range(first, first + len(self._state))

    def inputs(
        self,
        made: list[torch.Tensor],
        arguments: list[torch.Tensor],
        state: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
    ) -> list[Any]:
        """Consumes ``made``, so that a call gives that memory away. arguments: those that are saved,
        then those in whose memory others lie."""
        given = [gradient for gradient in gradients if gradient is not None]
        inputs = [*made, *arguments, *(state[i] for i in self._state), *given]
        made.clear()
        return inputs

    def call(
        self,
        inputs: list[Any],
        graphed: Callable[[list[Any]], Any],
        exchanged: dict[tuple[int, int], torch.Tensor] | None = None,
    ) -> list[Any]:
        """Makes one call by ``graphed``. The state's tensors among the inputs tell it from a rehearsal.
        exchanged: as of kept_graph.run()."""
        positions = self.state_positions
        try:
            self._call.state = inputs[positions.start : positions.stop]
            self._call.exchanged = exchanged
            return list(graphed(inputs))
        finally:
            self._call.state = self._call.exchanged = None

    def __call__(self, inputs: list[Any]) -> tuple[Any, ...]:
        """Consumes the list, as compiled functions do."""
        given = list(inputs)
        inputs.clear()
        own = getattr(self._call, "state", None)
        positions = self.state_positions
        state = given[positions.start : positions.stop]
        is_the_call = own is not None and all(a is b for a, b in zip(state, own, strict=True))
        return self._run(given) if is_the_call else self.rehearse(given)

    def rehearse(self, given: list[Any]) -> tuple[Any, ...]:
        """On other tensors than the call's. What Python does on the host is undone."""
        if not self._structure.python:
            return self._run(given)
        return undoing(lambda undo: self._rehearse(given, undo))

    def _rehearse(self, given: list[Any], undo: Undo) -> tuple[Any, ...]:
        every, positions = self._around.state.tensors(), self.state_positions
        runtime.begin_capturing(undo)
        undo.append(self._around.host.now().restore_if_changed)
        read: list[bool] = []
        tell = lambda: read.append(True)  # noqa: E731
        are_left_alone = without_rates(self._around.followed, tell, undo)
        own = [every[i] for i in self._state]
        exchange = runtime.engine().StorageExchange(own, given[positions.start : positions.stop])
        undo.append(exchange.undo)
        has_seeded = self._around.begin_to_look_for_seeds(undo)
        outputs = self._run(given)
        if has_seeded():
            raise RuntimeError(SEEDS)
        if read or not are_left_alone():
            raise RuntimeError(
                "its backward reads or sets a learning rate, which graphs follow in the forward"
            )
        return outputs

    def _run(self, given: list[Any]) -> tuple[Any, ...]:
        made, positions = self._structure.made, self.state_positions
        themselves, others = self._arguments
        between = made + len(themselves)
        state = dict(zip(self._state, given[positions.start : positions.stop], strict=True))
        bases = {
            MADE: dict(enumerate(self._where_it_is_read(given[:made]))),
            ARGUMENT: dict(zip(themselves, given[made:between], strict=True)),
            IN_ARGUMENT: dict(zip(others, given[between : positions.start], strict=True)),
            STATE: state,
            IN_STATE: state,
        }
        rest = iter(given[positions.stop :])
        gradients = [next(rest) if has_gradient else None for has_gradient in self._has_gradient]
        device = self._around.device
        exchanged = getattr(self._call, "exchanged", None) or {}
        return tuple(kept_graph.run(self._structure, bases, gradients, self._needed, device, exchanged))

    def _where_it_is_read(self, made: list[torch.Tensor]) -> list[torch.Tensor]:
        """Attention reads its random state on the host, unless the stream captures. That of a replay is
        on the GPU."""
        on_host = self._structure.on_host
        if not on_host or torch.cuda.is_current_stream_capturing():
            return made
        return [tensor.cpu() if i in on_host else tensor for i, tensor in enumerate(made)]


class Backwards:
    """The backwards of one variant of a callable. Thread-safe beside Python's lock as partitions are.

    refuse: is told why the callable is to run as it is from now on. owners: by storage of the state,
    the program's tensors that have it."""

    def __init__(self, name: str, around: Surroundings, options: Options) -> None:
        self.name = name
        self.refuse: Callable[[str], None] = lambda reason: None
        self.owners = around.owners()
        self._around = around
        self._options = options
        self._known: dict[Any, tuple[BackwardFunction, Partition | None]] = {}

    def run(
        self,
        structure: Structure,
        made: list[torch.Tensor],
        arguments: list[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        needed: Sequence[bool],
    ) -> list[torch.Tensor | None]:
        """Gradients of the needed ends. Consumes ``made``."""
        pattern = tuple(g is not None for g in gradients), tuple(needed)
        function, partition = self._find(structure, pattern)
        inputs = function.inputs(made, arguments, self._around.state.tensors(), gradients)
        if partition is None or not all(map(self._is_plain, gradients)) or not self._is_same(structure):
            return function.call(inputs, function, self._exchanged())
        if structure.python and not structure.is_observed:
            return self._observe(structure, function, inputs)
        outputs = function.call(inputs, partition.callable)
        if partition.written:
            self.refuse("its backward writes to a tensor that it is given")
        return outputs

    def _find(
        self, structure: Structure, pattern: _Pattern
    ) -> tuple[BackwardFunction, Partition | None]:
        key = (id(structure), pattern, runtime.engine().modes())
        found = self._known.get(key)
        if found is not None:
            return found
        function = BackwardFunction(structure, self._around, pattern)
        # One that belongs to a single call has kept what it saved.
        if structure.patterns >= _MOST_PATTERNS or not structure.is_lasting:
            return function, None
        structure.patterns += 1
        positions = function.state_positions
        info = PartitionInfo(
            name=f"{self.name} backward",
            kind="backward",
            device=self._around.device.index or 0,
            argument_count=positions.stop + sum(pattern[0]),
            counts_numbers=True,
            static=frozenset(positions),
            on_host=frozenset(structure.on_host),
            compared_calls=_COMPARED_CALLS,
            runs_program=True,
        )
        return self._known.setdefault(key, (function, Partition(function, info, self._options)))

    def _exchanged(self) -> dict[tuple[int, int], torch.Tensor]:
        """The program's tensors as they are now, where it has exchanged memory of the state."""
        if self._around.state.is_valid:
            return {}
        return {(i, n): t.detach() for i, of in self.owners.items() for n, t in enumerate(of)}

    def _is_plain(self, gradient: torch.Tensor | None) -> bool:
        if gradient is None:
            return True
        is_tensor = type(gradient) is torch.Tensor and gradient.layout == torch.strided
        return is_tensor and gradient.device == self._around.device

    def _is_same(self, structure: Structure) -> bool:
        """Whether a graph may serve the call: the state is where it was, and what Python could read."""
        if not self._around.state.is_valid:
            return False
        return not structure.python or not structure.is_observed or self._around.host.holds()

    def _observe(
        self, structure: Structure, function: BackwardFunction, inputs: list[Any]
    ) -> list[torch.Tensor | None]:
        """The first backward with Python in it, uncaptured."""
        before, drawn = self._around.host.now(), random_state()

        def body(undo: Undo) -> tuple[list[torch.Tensor | None], SchedulerUse]:
            schedulers = watch_schedulers(undo, before.found.schedulers)
            return function.call(inputs, function), schedulers

        outputs, schedulers = undoing(body)
        structure.is_observed = True
        try:
            changed = before.changes(before.now())
        except Exception as error:  # of what the walk has met
            signal_exceptions.pass_on(error)
            changed = [runtime.first_line(error)]
        changed += sorted(schedulers.written)
        if random_state() != drawn:
            changed.append("a random number generator on the CPU")
        if changed:
            self.refuse(f"its backward changes {changed[0]}, which a replay would not")
        elif schedulers.read:
            self.refuse(
                f"its backward reads {min(schedulers.read)}, a learning-rate scheduler; read it outside"
            )
        return outputs
