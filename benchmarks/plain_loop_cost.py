"""The host time of a plain loop's clip and optimizer step, as they are and with graphs.

    python -m benchmarks.plain_loop_cost

Linear layers, fused AdamW, ``clip_grad_norm_`` of a list of parameters. Without a GPU a partition that
only returns takes the engine's place: "with a graph" is the time of PyGraph's work around a replay, and
"as it is" includes PyTorch's kernels on the CPU, which are small. With a GPU both are host times. Least
of several rounds, in microseconds.
"""

from __future__ import annotations

import functools

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.graphed_call_cost import Call, microseconds, use_nothing
from pygraph import options, runtime
from pygraph.callables import gradient_clips, optimizer_steps, trained

_WARM_UP = 60
_NAMES = ("AdamW.step", "clip_grad_norm_")


def calls(layers: int, device: str, graphs: bool) -> dict[str, Call]:
    """By name; each keeps the gradients of one backward."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers))).to(device)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, fused=True)
    if graphs:
        trained.note_program(parameters, options.own({"optimizers": "auto", "select": "always"}))
    model(torch.randn(3, 4, device=device)).square().sum().backward()
    step = lambda: optimizer.step()  # noqa: E731  # which gets another one
    clip = functools.partial(torch.nn.utils.clip_grad_norm_, parameters, 1.0)
    return dict(zip(_NAMES, (step, clip), strict=True))


def main() -> None:
    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        use_nothing()
    optimizer_steps.install()
    gradient_clips.install()
    device = "cuda" if has_gpu else "cpu"
    where = torch.cuda.get_device_name() if has_gpu else "no GPU, a partition that does nothing"
    table = Table(title=f"One call, microseconds ({where}, PyTorch {torch.__version__})")
    for heading in ("", "gradients", "as it is", "with a graph"):
        table.add_column(heading, justify="right" if heading else "left")
    for layers in (1, 5, 12, 72):
        found = [calls(layers, device, graphs) for graphs in (False, True)]
        for _ in range(_WARM_UP):
            for call in (call for of in found for call in of.values()):
                call()
        partitions = [p for p in runtime.all_partitions() if p.info.name in _NAMES]
        if len(partitions) < 2:
            raise SystemExit("no graphs")
        for name in _NAMES:
            times = [f"{microseconds(of[name]):.1f}" for of in found]
            table.add_row(name, str(2 * layers), *times)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
