"""Programs with graphs under PyTorch's profiler, each in a process of its own: CUPTI can end it."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import sys
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
import pygraph

def gpu_profile(**settings):
    return profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], **settings)

def block(a, b):
    convolution = nn.Conv2d(a, b, 3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))

torch.manual_seed(0)
blocks = [block(3, 64), block(64, 128), block(128, 256), block(256, 512)]
model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(512 * 16, 10)).cuda()
way = sys.argv[1]
if way == "backend":
    compiled = torch.compile(model, backend="pygraph", options={"pygraph.select": "always"})
else:
    compiled = model
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
images = [torch.randn(16, 3, 64, 64, device="cuda") for _ in range(3)]
batches = [(image, torch.randint(0, 10, (16,), device="cuda")) for image in images]

def train(x, y):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(compiled(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()

step = pygraph.graph(train, select="always") if way == "graph" else train

def steps(count):
    for i in range(count):
        step(*batches[i % 3])
    torch.cuda.synchronize()

def replays():
    return sum(s.replays for s in pygraph.stats())

def kernels(found):
    return sum(e.device_type == torch.autograd.DeviceType.CUDA for e in found.events())

with gpu_profile():  # before there is a graph
    torch.ones(2, device="cuda").add_(1)
    torch.cuda.synchronize()
steps(60)
before = replays()
assert before > 0, [s.reason for s in pygraph.stats()]
counts = []
for _ in range(3):
    with gpu_profile() as found:
        steps(10)
    counts.append(kernels(found))
    steps(5)
assert replays() > before + 30, (before, replays())
assert min(counts) > 100, counts  # none is empty
done = []
schedule = torch.profiler.schedule(wait=1, warmup=2, active=2, repeat=3)
with gpu_profile(schedule=schedule, on_trace_ready=lambda p: done.append(kernels(p))) as found:
    for i in range(20):
        steps(1)
        found.step()
assert len(done) == 3 and min(done) > 20, done
steps(60)
print("survived", counts, done)
"""


@pytest.mark.parametrize("way", ["graph", "backend"])
def test_a_convolutional_network_survives_its_profiles(way: str) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", _PROGRAM, way],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "survived" in done.stdout
