"""A LightningModule and the Trainer of Lightning. The network of the module is compiled.

python examples/python/lightning_training.py [--size small]
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import time
import warnings
from typing import Any

import torch
from before_and_after import REPEATS, Times, arguments, compare_runs, compiled, synchronize

options = arguments("a multilayer perceptron with Lightning")
if importlib.util.find_spec("lightning") is None:
    print("lightning is not installed: pip install lightning")
    sys.exit(0)

import lightning  # noqa: E402  may be missing

WIDTH, LAYERS, BATCH = {"small": (16, 2, 4), "base": (1024, 12, 64)}[options.size]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")  # about loaders without workers


class Classifier(lightning.LightningModule):
    def __init__(self, backend: str) -> None:
        super().__init__()
        layers = [
            torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(LAYERS)
        ]
        self.network = compiled(torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 10)), backend)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        inputs, labels = batch
        return torch.nn.functional.cross_entropy(self.network(inputs), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Clock(lightning.Callback):
    """Notes the time at the ends of some steps."""

    def __init__(self, ends: list[int]) -> None:
        self.ends = ends
        self.times = [time.perf_counter()]

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if trainer.global_step in self.ends:
            synchronize()
            self.times.append(time.perf_counter())


def run(backend: str) -> Times:
    ends = [options.first_steps + i * options.steps for i in range(REPEATS + 1)]
    clock = Clock(ends)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = lightning.Trainer(
        max_steps=ends[-1],
        accelerator="auto",
        devices=1,
        enable_checkpointing=False,
        callbacks=[clock],
        **quiet,
    )
    data = torch.utils.data.TensorDataset(torch.randn(BATCH * 4, WIDTH), torch.arange(BATCH * 4) % 10)
    trainer.fit(Classifier(backend), torch.utils.data.DataLoader(data, batch_size=BATCH))
    first, *later = [end - begin for begin, end in zip(clock.times, clock.times[1:], strict=False)]
    return Times(first, [seconds / options.steps for seconds in later])


compare_runs(options, run)
