"""What must hold where PyGraph's wheel is installed beside a release of PyTorch: its argument."""

from __future__ import annotations

import sys

import torch

import pygraph
from pygraph import runtime


def check(release: str) -> None:
    assert torch.__version__.startswith(f"{release}."), torch.__version__
    engine = runtime.engine()
    assert engine.built_for == release
    assert "site-packages" in engine.__file__

    x = torch.arange(3.0)
    compiled = torch.compile(lambda x: x * 2 + 1, backend="pygraph")  # found by its entry point
    assert torch.equal(compiled(x), x * 2 + 1)
    states = {patch.name: patch.state for patch in pygraph.status().patches}
    assert states["compiled_call"] == "active", pygraph.status()
    assert not {"failed", "unknown source"} & set(states.values()), pygraph.status()

    runtime.engine.cache_clear()
    torch.__version__ = "2.99.0"
    try:
        runtime.engine()
    except ImportError as error:
        assert "this is 2.99.0" in str(error) and release in str(error), error
    else:
        raise AssertionError("an engine was loaded for PyTorch 2.99.0")


if __name__ == "__main__":
    check(sys.argv[1])
