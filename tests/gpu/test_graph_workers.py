"""A step that hands work on the GPU to another thread."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_WITH_A_WORKER = """
import sys
from concurrent.futures import ThreadPoolExecutor
import torch
import pygraph

pool = ThreadPoolExecutor(1)

def step(x):
    h = x * 2
    pool.submit(h.mul_, 3).result()
    return h + 1

graphed = pygraph.graph(step)
for i in range(24):
    x = torch.full((1024,), float(i), device="cuda")
    got = graphed(x)
    torch.cuda.synchronize()
    assert torch.equal(got, x * 6 + 1), (i, got[:2].tolist())
print("; ".join(row.reason for row in pygraph.stats()))
"""


def test_a_worker_of_the_step_uses_the_gpu(tmp_path: Path) -> None:
    """In a process of its own: an illegal access would end the use of the GPU."""
    script = tmp_path / "with_a_worker.py"
    script.write_text(_WITH_A_WORKER)
    made = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert made.returncode == 0, made.stderr[-2000:]
    assert "it hands work to another thread" in made.stdout, made.stdout
