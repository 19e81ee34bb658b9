"""``pygraph.check``: a step by its graph and uncaptured, from one state of the program, compared.

The program is put back to where it was after each of three series of steps: two uncaptured ones, whose
differences show how far results vary by chance, and one with a graph made for it. What is put back:
tensors that can be reached from the step or are passed to it, their gradients, attributes,
dictionaries, lists, closures, and PyTorch's random numbers. What a step prints or writes to files
happens three times, and generators and other iterators move on.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from pygraph import options, runtime
from pygraph.callables.graphed import Graphed
from pygraph.callables.host.program_state import ProgramState, gradient_of
from pygraph.callables.observation import tensors_in

_LEAST_STEPS = 12  # after which a graph has been replayed several times


@dataclasses.dataclass(frozen=True)
class Difference:
    """The largest absolute differences of one result or tensor.

    path: of the tensor, or the number of the result and the step.
    graphed: between the graph's series and the first uncaptured one.
    uncaptured: between the two uncaptured series.
    """

    path: str
    graphed: float
    uncaptured: float


@dataclasses.dataclass(frozen=True)
class Check:
    """The result of :func:`check`. Prints as text.

    steps: number of steps in each series.
    replays: replays in the series with a graph.
    reasons: why calls had no graph.
    differences: results and tensors in which another series differs from the first one, the largest
        difference of the graph's series first.
    """

    steps: int
    replays: int
    reasons: list[str]
    differences: list[Difference]

    @property
    def is_equal(self) -> bool:
        """Whether the graph's series has the values of the first uncaptured one. 0.0 equals -0.0, and
        NaN equals NaN."""
        return all(difference.graphed == 0 for difference in self.differences)

    def __str__(self) -> str:
        lines = [f"{self.steps} steps, {self.replays} replays"]
        lines += [f"no graph: {reason}" for reason in self.reasons]
        lines += [
            f"{d.path}: differs by {d.graphed:.3g}, another uncaptured series by {d.uncaptured:.3g}"
            for d in self.differences
        ]
        return "\n".join(lines if self.differences else [*lines, "equal bits"])


def check(step: Callable[..., Any], batches: Iterable[Any]) -> Check:
    """Compares series of steps with and without a graph; see the module.

    step: a callable, or the result of :func:`pygraph.graph`. batches: the arguments of each call, a
    tuple or one object; repeated if there are fewer than 12. Raises what the step raises. Not
    thread-safe: nothing else may use the step's tensors meanwhile.
    """
    if not callable(step):
        raise TypeError(f"pygraph.check takes a callable, not {type(step).__name__}")
    if not isinstance(batches, Iterable):
        raise TypeError(
            "pygraph.check takes the arguments of each call, as a list of tuples, not "
            f"{type(batches).__name__}"
        )
    given = [batch if isinstance(batch, tuple) else (batch,) for batch in batches]
    if not given:
        raise ValueError("pygraph.check needs at least one batch")
    calls = list(itertools.islice(itertools.cycle(given), max(len(given), _LEAST_STEPS)))
    chosen = options.own({"lanes": 1, "select": "always"})
    graphed = step.anew(chosen) if isinstance(step, Graphed) else Graphed(step, chosen)
    plain = graphed.prepared()
    function = graphed.__wrapped__
    state = ProgramState({getattr(function, "__name__", "step"): function, "batches": given})
    known = set(runtime.partitions)
    expected, again, found = (_series(state, run, calls) for run in (plain, plain, graphed))
    rows = [row for row in runtime.all_partitions() if row is graphed or row not in known]
    entries = [entry for row in rows for entry in row.entries.values()]
    replays = sum(entry.graph.replays for entry in entries if entry.graph is not None)
    reasons = sorted({entry.reason for entry in entries if entry.reason})
    graphed.reset()
    return Check(len(calls), replays, reasons, _differences(expected, again, found))


_Values = dict[str, torch.Tensor]


def _series(state: ProgramState, step: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> _Values:
    """Makes the steps. Returns their results and what the tensors are then, by path; afterwards
    everything is as it was."""
    try:
        values: _Values = {}
        for i, args in enumerate(calls):
            for j, result in enumerate(tensors_in(step(*args))):
                values[f"result {j} of step {i}"] = _copied(result)
        for path, tensor in state.tensors_now().items():
            values[path] = _copied(tensor)
            gradient = gradient_of(tensor)
            if gradient is not None:
                values[f"{path}.grad"] = _copied(gradient)
        return values
    finally:
        state.put_back()


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    is_dense = tensor.layout == torch.strided
    return tensor.detach().clone() if is_dense else tensor.detach().to_dense()


def _differences(expected: _Values, again: _Values, found: _Values) -> list[Difference]:
    differences = []
    for path in expected.keys() | again.keys() | found.keys():
        of = [values.get(path) for values in (expected, again, found)]
        difference = Difference(path, _distance(of[0], of[2]), _distance(of[0], of[1]))
        if difference.graphed != 0 or difference.uncaptured != 0:
            differences.append(difference)
    return sorted(differences, key=lambda d: (-d.graphed, d.path))


def _distance(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    """The largest absolute difference; infinite where one is missing, or is no number where the other
    one is."""
    if a is None or b is None or a.shape != b.shape:
        return float("inf")
    if torch.equal(a, b) or a.numel() == 0:
        return 0.0
    difference = (a.double() - b.double()).abs()
    is_same = (a == b) | (a.isnan() & b.isnan())
    return float(difference.nan_to_num(float("inf")).masked_fill(is_same, 0.0).max())
