"""The host time of one call of a graphed callable that a graph serves, by part.

    python -m benchmarks.graphed_call_cost
    python -m benchmarks.graphed_call_cost --inside [--model layers|resnet50|bert] [--layers 72]
                                           [--compile] [--sweep 256]

A training step of 1, 12 and 72 linear layers with fused AdamW: 8 tensors of state per layer (two
parameters, two moments and a step count of each). With ``zero_grad`` at the end no gradient is left;
with ``zero_grad`` at the beginning, two per layer are.

Without a GPU a partition that only returns takes the engine's place, so "in all" is the time of
PyGraph's work around a replay. With a GPU it includes the replay, and is host time. Least of several
rounds, in microseconds.

``--inside`` has clocks in the calls of one step (call_clocks.py): "warm" right after another call, and
"cold" after a sweep through so many MB has emptied the CPU's caches, as other work does between two
calls of a program; with a GPU also the first and the seventh of calls in a row. Medians, in
microseconds. PYGRAPH_SHORT_CHECKS=0 shows what calls take without short checks.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import pygraph
from benchmarks import call_clocks
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

    def replay(self, inputs: list[Any]) -> tuple[Any, ...] | None:
        return self._outputs or None


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


def linear_layers(layers: int) -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers)))


def make_step(model: torch.nn.Module, leaves_gradients: bool) -> Graphed:
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
        call_clocks.synchronize()
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


def table_of(columns: dict[str, dict[str, float]], where: str) -> Table:
    table = Table(title=f"One call, microseconds ({where}, PyTorch {torch.__version__})")
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for part in dict.fromkeys(part for of in columns.values() for part in of):
        table.add_row(part, *(f"{of.get(part, 0.0):.2f}" for of in columns.values()))
    return table


def warmed_up(step: Graphed, batch: Sequence[torch.Tensor]) -> Variant:
    """After calls until it has a graph."""
    for _ in range(_WARM_UP):
        step(*batch)
    found = [v for v in step._variants.all() if v.partition is not None]
    if len(found) != 1:
        raise SystemExit(f"no graph: {[entry.reason for entry in step.entries.values()]}")
    return found[0]


def alone(device: str) -> dict[str, dict[str, float]]:
    """Each part by itself, from warm caches."""
    columns: dict[str, dict[str, float]] = {}
    for leaves_gradients in (False, True):
        for layers in (1, 12, 72):
            step = make_step(linear_layers(layers).to(device), leaves_gradients)
            x, y = torch.randn(3, 4, device=device), torch.randn(3, 4, device=device)
            variant = warmed_up(step, (x, y))
            name = f"{8 * layers} tensors" + (f", {2 * layers} gradients" if leaves_gradients else "")
            columns[name] = {"in all": microseconds(functools.partial(step, x, y))}
            for part, call in parts(step, variant, x, y).items():
                columns[name][part] = microseconds(call)
    return columns


class Classifier(torch.nn.Module):
    """A BERT of 12 layers, small ones without a GPU."""

    def __init__(self, device: str) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        if device != "cuda":
            config.hidden_size = config.intermediate_size = 24
        self.model = BertForSequenceClassification(config)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(ids).logits
        return logits


def bert(device: str) -> tuple[torch.nn.Module, Sequence[torch.Tensor]]:
    """With a batch."""
    ids = torch.randint(0, 30000, (8 if device == "cuda" else 2, 128), device=device)
    return Classifier(device).to(device), (ids, torch.randn(len(ids), 2, device=device))


def resnet50(device: str) -> tuple[torch.nn.Module, Sequence[torch.Tensor]]:
    """With a batch."""
    import torchvision  # needs seconds, and only here

    x = torch.randn(16 if device == "cuda" else 2, 3, 64, 64, device=device)
    model = torchvision.models.resnet50(num_classes=4).to(device)
    return model, (x, torch.randn(len(x), 4, device=device))


MODELS = {"resnet50": resnet50, "bert": bert}


def inside(args: argparse.Namespace, device: str) -> dict[str, dict[str, float]]:
    """Parts of calls: medians, by how the calls are made."""
    model: torch.nn.Module = linear_layers(args.layers).to(device)
    batch: Sequence[torch.Tensor] = [torch.randn(3, 4, device=device) for _ in range(2)]
    if args.model != "layers":
        model, batch = MODELS[args.model](device)
    if args.compile:
        model.compile()
    step = make_step(model, leaves_gradients=False)
    warmed_up(step, batch)
    return call_clocks.columns(functools.partial(step, *batch), args.sweep)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inside", action="store_true", help="clocks in the calls")
    parser.add_argument("--layers", type=int, default=72)
    parser.add_argument("--model", choices=("layers", *MODELS), default="layers")
    parser.add_argument("--compile", action="store_true", help="the model, by Inductor")
    parser.add_argument("--sweep", type=int, default=256, help="MB")
    args = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        use_nothing()
    device = "cuda" if has_gpu else "cpu"
    where = torch.cuda.get_device_name() if has_gpu else "no GPU, a partition that does nothing"
    columns = inside(args, device) if args.inside else alone(device)
    Console(width=120).print(table_of(columns, where))
    for row in pygraph.stats() if has_gpu and args.inside else []:
        print(row)


if __name__ == "__main__":
    main()
