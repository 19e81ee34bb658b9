"""DistributedDataParallel with two processes: gradients equal to Inductor's, graphs captured."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pygraph

_STEPS = 24  # compiling, recording, and a trial of each graph


class Model(nn.Module):
    """Of the test's own, because Dynamo does not compile frames of torch.nn itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def _train(rank: int, world: int, backend: str, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world)
    torch.manual_seed(0)
    module = Model().cuda()
    model = torch.compile(DistributedDataParallel(module, device_ids=[rank]), backend=backend)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    torch.manual_seed(rank + 1)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        model(torch.randn(32, 256, device="cuda")).square().mean().backward()
        optimizer.step()
    rows = [f"{row.name} {row.state} {row.reason}" for row in pygraph.stats()]
    result = {"weights": [p.detach().cpu() for p in module.parameters()], "rows": rows}
    torch.save(result, os.path.join(folder, f"{backend}-{rank}.pt"))
    dist.destroy_process_group()


def test_two_processes(tmp_path: object) -> None:
    results = {}
    for port, backend in ((29511, "inductor"), (29512, "pygraph")):
        mp.spawn(_train, args=(2, backend, port, str(tmp_path)), nprocs=2)
        for rank in range(2):
            results[backend, rank] = torch.load(os.path.join(str(tmp_path), f"{backend}-{rank}.pt"))
    for rank in range(2):
        rows = results["pygraph", rank]["rows"]
        assert sum(" captured" in row for row in rows) >= 2, rows
        for a, b in zip(
            results["pygraph", rank]["weights"], results["inductor", rank]["weights"], strict=True
        ):
            torch.testing.assert_close(a, b)
    for a, b in zip(results["pygraph", 0]["weights"], results["pygraph", 1]["weights"], strict=True):
        assert torch.equal(a, b)
