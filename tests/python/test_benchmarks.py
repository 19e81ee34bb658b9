"""The workloads: every one runs on a fake GPU, in its mode, with the sizes that its table says."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from benchmarks.paper import PAPER
from benchmarks.workloads import WORKLOADS, Workload
from pygraph.explanation.fake_gpu import on_fake_gpu

# A data-dependent program: only a GPU can run it.
_NEEDS_DATA = {"VM", "mask_rcnn"}


@pytest.mark.parametrize("workload", [*PAPER, *WORKLOADS], ids=lambda workload: workload.key)
def test_a_workload_runs_on_a_fake_gpu(workload: Workload) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with mode:
            module = workload.build()
    except DataDependentOutputException:  # timm computes drop rates with tensors
        module = workload.build()
    module = on_fake_gpu(module, mode).train(workload.mode == "training")
    with mode, torch.no_grad():
        args, kwargs = workload.make_inputs(workload.batch)
        assert all(t.is_cuda for t in [*args, *kwargs.values()])
        if workload.name in _NEEDS_DATA:
            return
        result = module(*args, **kwargs)
    if workload.mode == "training":
        assert result.dim() == 0, "a training step ends in one number"


def test_the_papers_workloads_are_complete() -> None:
    assert len(PAPER) == 25
    assert len({workload.key for workload in [*PAPER, *WORKLOADS]}) == 25 + len(WORKLOADS)
    assert sum(workload.mode == "training" for workload in PAPER) == 10
