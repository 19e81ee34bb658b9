"""Programs of their own whose graphs hold blocks, for tests that may hang or end the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from .held_blocks import MIB

_ROOT = Path(__file__).resolve().parents[2]


def step_of_seven(x: torch.Tensor) -> torch.Tensor:
    """Seven or eight blocks of 40 MiB: 280 to 320 MiB, which are rounded to 384."""
    parts = [torch.sin(x * (i + 1)) for i in range(7)]
    return torch.stack([part.amax() for part in reversed(parts)]).sum()


def step_of_small_parts(x: torch.Tensor) -> torch.Tensor:
    """Seven or eight parts of 20 MiB, no blocks: 140 to 160 MiB, which are rounded to 192."""
    y = x[: 5 * MIB]
    parts = [torch.sin(y * (i + 1)) for i in range(7)]
    return torch.stack([part.amax() for part in reversed(parts)]).sum()


_PREAMBLE = """
import faulthandler, gc, os, signal, sys, threading, time
faulthandler.dump_traceback_later(45, exit=True)
import torch, pygraph
from pygraph import runtime
from pygraph.gpu import allocator
from pygraph.partition import recording_policy
recording_policy._RECORDED_AT_ONCE = recording_policy._RECORDED_AT_ONCE_IF_DYNAMIC = 100
from tests.gpu.held_blocks import *
from tests.gpu.support import assert_same, captured, refusals
from tests.gpu.held_blocks_programs import step_of_seven, step_of_small_parts

def is_in_use():
    return bool(captured()) and not refusals()

def say(*what):
    print(*what, flush=True)

def limit_to(bytes_):
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(bytes_ / total)
"""


def run_program(source: str, **environment: str) -> list[str]:
    """The lines of a program of its own, which must say "done" last, and end well."""
    paths = [str(_ROOT), *(path for path in sys.path if path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYGRAPH_SELECT": "always"}
    env.pop("PYGRAPH_HOLD_MEMORY", None)
    env.pop("PYTORCH_ALLOC_CONF", None)
    env.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    process = subprocess.run(
        [sys.executable, "-c", _PREAMBLE + source],
        env={**env, **environment},
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    message = f"{process.returncode}\n{process.stdout}\n{process.stderr[-6000:]}"
    lines = process.stdout.splitlines()
    assert process.returncode == 0, message
    assert lines and lines[-1] == "done", message
    return lines
