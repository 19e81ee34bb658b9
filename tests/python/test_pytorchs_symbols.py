"""Functions of libtorch_cuda.so that the engine looks up by name."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import torch

_BINDINGS = Path(__file__).resolve().parents[2] / "bindings"
_LIBRARY = Path(torch.__file__).with_name("lib") / "libtorch_cuda.so"
# PyTorch 2.12 does not export the first one.
_SIZES = {"_ZN2at4cuda22getChosenWorkspaceSizeEv", "_ZN2at4cuda26getCUDABlasLtWorkspaceSizeEv"}


def _names() -> set[str]:
    """In the engine's sources."""
    sources = "".join(path.read_text() for path in _BINDINGS.rglob("*.cc"))
    return set(re.findall(r'"(_ZN2at4cuda\w+|aoti_torch_get_current_cuda_\w+)"', sources))


def test_this_pytorch_exports_them() -> None:
    library = ctypes.CDLL(str(_LIBRARY))
    names = _names()
    assert names >= _SIZES and len(names) >= 5
    missing = {name for name in names if not hasattr(library, name)}
    assert missing < _SIZES
