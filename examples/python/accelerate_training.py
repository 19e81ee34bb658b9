"""A training loop with Hugging Face accelerate. The model is compiled before it is prepared.

python examples/python/accelerate_training.py [--size small]
accelerate launch examples/python/accelerate_training.py
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
from before_and_after import arguments, compare, compiled

options = arguments("a multilayer perceptron with accelerate")
if importlib.util.find_spec("accelerate") is None:
    print("accelerate is not installed: pip install accelerate")
    sys.exit(0)

from accelerate import Accelerator  # noqa: E402  may be missing

WIDTH, LAYERS, BATCH = {"small": (16, 2, 4), "base": (1024, 12, 64)}[options.size]


def make_step(backend: str) -> Callable[[], Any]:
    accelerator = Accelerator()
    layers = [
        torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(LAYERS)
    ]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.utils.data.TensorDataset(torch.randn(BATCH * 4, WIDTH), torch.arange(BATCH * 4) % 10)
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(compiled(model, backend), optimizer, loader)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))

    def step() -> torch.Tensor:
        inputs, labels = next(batches)
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


compare(options, make_step)
