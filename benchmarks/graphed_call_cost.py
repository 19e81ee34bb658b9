"""The host time of one call of a graphed callable that a graph serves, by part.

    python -m benchmarks.graphed_call_cost

A training step of 1, 12 and 72 linear layers with fused AdamW: 8 tensors of state per layer (two
parameters, two moments and a step count of each). With ``zero_grad`` at the end no gradient is left;
with ``zero_grad`` at the beginning, two per layer are.

Without a GPU a partition that only returns takes the engine's place, so "in all" is the time of
PyGraph's work around a replay. With a GPU it includes the replay, and is host time. Least of several
rounds, in microseconds.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import pygraph
from pygraph import runtime
from pygraph.callables import serving, trained, variant
from pygraph.callables.graphed import Graphed
from pygraph.callables.host import probes
from pygraph.callables.signature import take_apart
from pygraph.callables.variant import Variant
from pygraph.partition.signature import Entry

_ROUNDS = 150  # short ones, as others may use the machine
_CALLS = 40  # few enough for the launch queue
_WARM_UP = 60

Call = Callable[[], object]


class Nothing:
    """A partition whose replays return what the first call did."""

    def __init__(self, function: Callable[..., Any], info: Any, options: Any) -> None:
        self._function = function
        self._outputs: tuple[Any, ...] = ()
        self.info = info
        self.entries = {b"": Entry()}
        self.written = frozenset(info.static)

    def reset(self) -> None:
        self._outputs = ()

    def callable(self, inputs: list[Any]) -> tuple[Any, ...]:
        if not self._outputs:
            self._outputs = tuple(self._function(inputs))
        inputs.clear()
        return self._outputs


def use_nothing() -> None:
    """Callables have graphs without a GPU, which do nothing."""
    for module, name, instead in (
        (runtime, "unavailable_reason", lambda: None),
        (variant, "Partition", Nothing),
        *((of, "device_of", lambda tensors: torch.device("cpu")) for of in (variant, trained)),
        (probes, "is_on_host", lambda tensor: False),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
    ):
        setattr(module, name, instead)


def make_step(layers: int, device: str, leaves_gradients: bool) -> Graphed:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if leaves_gradients:
            optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if not leaves_gradients:
            optimizer.zero_grad()
        return loss

    made: Graphed = pygraph.graph(step, select="always")
    return made


def microseconds(call: Call) -> float:
    """The host's time of one call."""
    least = float("inf")
    for _ in range(_ROUNDS):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(_CALLS):
            call()
        least = min(least, time.perf_counter() - start)
    return least / _CALLS * 1e6


def parts(step: Graphed, variant: Variant, x: torch.Tensor, y: torch.Tensor) -> dict[str, Call]:
    """What a call does, in this order; the rest is the partition's, and Python's between them."""
    arguments = take_apart((x, y), {})
    around, of = variant._around, variant._step
    assert arguments is not None and variant.host is not None and around is not None and of is not None
    host = variant.host
    return {
        "may it be served?": serving.may_be_served,
        "arguments": lambda: step._forms.take_apart((x, y), {}),
        "another form": lambda: take_apart((x, y), {}),
        "rules": lambda: step._refused.has(arguments.key),
        "state, gradients": lambda: variant.fits(),
        "host": host.holds,
        "shared memory": lambda: variant.is_shared_by(arguments),
        "inputs": lambda: of.inputs(arguments),
        "versions": lambda: variant._tell_autograd(arguments),
    }


def main() -> None:
    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        use_nothing()
    device = "cuda" if has_gpu else "cpu"
    where = torch.cuda.get_device_name() if has_gpu else "no GPU, a partition that does nothing"
    table = Table(title=f"One call, microseconds ({where}, PyTorch {torch.__version__})")
    columns: dict[str, dict[str, float]] = {}
    for leaves_gradients in (False, True):
        for layers in (1, 12, 72):
            step = make_step(layers, device, leaves_gradients)
            x, y = torch.randn(3, 4, device=device), torch.randn(3, 4, device=device)
            for _ in range(_WARM_UP):
                step(x, y)
            found = [v for of in step._variants.values() for v in of if v.partition is not None]
            if len(found) != 1:
                raise SystemExit(f"no graph: {[entry.reason for entry in step.entries.values()]}")
            name = f"{8 * layers} tensors" + (f", {2 * layers} gradients" if leaves_gradients else "")
            columns[name] = {"in all": microseconds(functools.partial(step, x, y))}
            for part, call in parts(step, found[0], x, y).items():
                columns[name][part] = microseconds(call)
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for part in next(iter(columns.values())):
        table.add_row(part, *(f"{of[part]:.2f}" for of in columns.values()))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
