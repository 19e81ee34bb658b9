"""Fixtures of the tests that need no GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo import eval_frame

from pygraph import compiled_call
from tests.python.compiled_programs import Backend, OurBackend


@pytest.fixture(params=[OurBackend, Backend], ids=["ours", "pytorch's"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """One whose programs are called by the engine, one whose programs PyTorch calls."""
    compiled_call.install()
    torch._dynamo.reset()
    yield request.param()
    assert eval_frame.set_eval_frame(None) is None
    assert not torch._C._dynamo.eval_frame.set_skip_guard_eval_unsafe(False)
    eval_frame._in_optimized_module = False  # threads may leave another value; PyTorch's too
