"""The host time of what verification computes besides the runs, by part.

    python -m benchmarks.verification_cost [--device cuda] [--hidden 768]

The parts: fingerprints of the gradients of a 12-layer BERT; the thorough check of 50 suspects, of which
some or all differ from run to run; copies of 250 inputs, half of those of a call. Without a GPU the
time of an operator is mostly that of its call where ``--hidden`` is small. Least of several rounds, in
milliseconds, and the number of PyTorch's operators.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pygraph.gpu.clones import clone_shared_storages
from pygraph.gpu.fingerprints import fingerprints
from pygraph.verify.compare import Comparison

_LAYERS, _POSITIONS, _WORDS_PER_HIDDEN, _ROUNDS = 12, 512, 40, 10


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def gradients(hidden: int, device: str) -> list[torch.Tensor]:
    """Tensors of the sizes of BERT's parameters."""
    layer: list[tuple[int, ...]] = [(hidden, hidden)] * 4 + [
        (4 * hidden, hidden),
        (hidden, 4 * hidden),
        (4 * hidden,),
    ]
    layer += [(hidden,)] * 9
    others: list[tuple[int, ...]] = [
        (_WORDS_PER_HIDDEN * hidden, hidden),
        (_POSITIONS, hidden),
        (2, hidden),
    ]
    others += [(hidden, hidden), (hidden,), (hidden,), (hidden,)]
    return [torch.randn(size, device=device) for size in layer * _LAYERS + others]


def thorough_check(noisy: int, device: str) -> Callable[[], object]:
    """Six executions with 50 results of which ``noisy`` differ from one to the next."""
    exact = [torch.rand(100, device=device) + 1 for _ in range(50)]
    noise = 1e-6
    results = [
        [x + noise * torch.randn_like(x) if i < noisy else x.clone() for i, x in enumerate(exact)]
        for _ in range(6)
    ]

    def compare() -> object:
        comparison = Comparison(results[0])
        comparison.find_unwritten(results[1])
        for run in results[2:5]:
            comparison.add_run(run)
        comparison.add_replay(results[5])
        return comparison.mismatches()

    return compare


def report(name: str, part: Callable[[], object]) -> None:
    with _Operators() as operators:
        part()
    seconds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        part()
        seconds.append(time.perf_counter() - start)
    print(f"{name:<40} {1e3 * min(seconds):8.2f} ms {operators.count:6} operators")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--hidden", type=int, default=768 if torch.cuda.is_available() else 16)
    options = parser.parse_args()
    found = gradients(options.hidden, options.device)
    report(f"{len(found)} fingerprints", lambda: fingerprints(found))
    for noisy in (0, 5, 50):
        report(f"thorough check, {noisy} differ", thorough_check(noisy, options.device))
    inputs = [torch.randn(64, device=options.device) for _ in range(500)]
    report("250 copies", lambda: clone_shared_storages(inputs, range(0, 500, 2)))


if __name__ == "__main__":
    main()
