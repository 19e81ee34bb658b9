"""A training script with a model of timm, SGD and mixed precision, on random images.

python examples/python/timm_training.py [--size small]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import timm
import torch
from before_and_after import DEVICE, arguments, compare, compiled

options = arguments("ResNet, training")
NAME, BATCH, SIDE = {"small": ("resnet10t", 2, 32), "base": ("resnet18", 16, 224)}[options.size]


def make_step(backend: str) -> Callable[[], Any]:
    model = timm.create_model(NAME, num_classes=10).to(DEVICE).train()
    forward = compiled(model, backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images = torch.randn(BATCH, 3, SIDE, SIDE, device=DEVICE)
    labels = torch.randint(0, 10, (BATCH,), device=DEVICE)

    def step() -> torch.Tensor:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(forward(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


compare(options, make_step)
