"""A vision training script, before and after: ResNet, mixed precision, a cosine schedule.

python examples/python/vision_training.py [--size small]

"After" adds one line: ``pygraph.graph`` around the function that makes a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torchvision
from before_and_after import DEVICE, STEPS, arguments, compare, compiled, graphed

options = arguments("ResNet-18, a whole training step", STEPS)
BATCH, SIDE, CLASSES = {"small": (2, 32, 10), "base": (16, 64, 100)}[options.size]


def make_step(backend: str) -> Callable[[], Any]:
    model = torchvision.models.resnet18(num_classes=CLASSES).to(DEVICE).train()
    forward = compiled(model, backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)

    def train_step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = criterion(forward(images), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    train_step = graphed(train_step, backend)

    def step() -> torch.Tensor:
        images = torch.randn(BATCH, 3, SIDE, SIDE, device=DEVICE)  # in place of a loader
        labels = torch.randint(0, CLASSES, (BATCH,), device=DEVICE)
        loss = train_step(images, labels)
        scheduler.step()  # counts on the host, so it stays outside; the graph follows the rate
        return loss

    return step


compare(options, make_step)
