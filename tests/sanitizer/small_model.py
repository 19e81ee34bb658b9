"""A small model in inference and training under PyGraph, to be run under compute-sanitizer.

Prints ``ok`` and the number of replays if results were those of the first, uncaptured call.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("PYGRAPH_SELECT", "always")

import torch
from torch import nn

import pygraph


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["inference", "training"])
    what = parser.parse_args().what
    torch.manual_seed(0)
    module = nn.Sequential(
        *(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.Softmax(-1)),
        nn.Linear(64, 8),
    ).cuda()
    model = torch.compile(module, backend="pygraph")
    x = torch.randn(16, 32, device="cuda")

    def call() -> torch.Tensor:
        if what == "inference":
            with torch.no_grad():
                return model(x)
        module.zero_grad()
        model(x).square().mean().backward()
        return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])

    expected = call().clone()
    for number in range(6):
        torch.testing.assert_close(call(), expected, msg=f"call {number + 1}")
    replays = sum(row.replays for row in pygraph.stats())
    assert replays > 0, pygraph.stats()
    print(f"ok, {replays} replays")


if __name__ == "__main__":
    main()
