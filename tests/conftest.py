"""Skips what this machine cannot run, with the reason."""

from __future__ import annotations

import pytest
import torch


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
