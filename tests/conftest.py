"""Skips what this machine cannot run, with the reason."""

from __future__ import annotations

import os

import pytest

# With pytest-xdist, workers take the GPUs that PYGRAPH_TEST_GPUS names ("0,1") by turns.
_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
_GPUS = [gpu for gpu in os.environ.get("PYGRAPH_TEST_GPUS", "").split(",") if gpu]
if _WORKER and _GPUS:
    os.environ["CUDA_VISIBLE_DEVICES"] = _GPUS[int(_WORKER.removeprefix("gw")) % len(_GPUS)]

import torch  # noqa: E402  after the choice of a GPU


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpus = torch.cuda.device_count()
    for item in items:
        path = str(item.path)
        if "tests/gpu/" in path:
            item.add_marker(pytest.mark.gpu)
            if gpus < 1:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
        if "tests/multi_gpu/" in path:
            item.add_marker(pytest.mark.multi_gpu)
            if gpus < 2:
                item.add_marker(pytest.mark.skip(reason="needs two NVIDIA GPUs"))
