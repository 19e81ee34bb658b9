"""Processes that are forked from one with graphs: they cannot use the GPU, and must end."""

from __future__ import annotations

import gc
import os

import torch
from torch.utils.data import DataLoader, Dataset

import pygraph

from .support import assert_used, captured, compiled, randn, watchdog


class _Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((64,), float(index))


def test_workers_of_a_data_loader_are_forked_while_graphs_are_used() -> None:
    weight = randn(64, 64, requires_grad=True)
    model = compiled(lambda x: (x @ weight).relu().sum())
    with watchdog(120):
        for _ in range(5):
            loader = DataLoader(_Numbers(), 4, num_workers=2, multiprocessing_context="fork")
            for batch in loader:
                x = batch.cuda()
                loss = model(x)
                loss.backward()
                torch.testing.assert_close(loss, (x @ weight).relu().sum())
    assert_used(2)


def test_a_child_that_drops_its_graphs_ends_and_leaves_the_parents() -> None:
    weight = randn(64, 64)
    with torch.no_grad(), watchdog(120):
        model = compiled(lambda x: (x @ weight).relu())
        x = randn(8, 64)
        for _ in range(5):
            expected = model(x)
        assert len(captured()) == 1
        child = os.fork()
        if child == 0:
            try:
                pygraph.stats()
                del model
                torch._dynamo.reset()
                gc.collect()
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert torch.equal(model(x), expected)
        assert len(captured()) == 1
