"""PyTorch's profiler in a process with CUDA graphs.

The profiler loads NVIDIA's library for profiles, CUPTI, for each profile, and unloads it afterwards. A
process with CUDA graphs can crash in a later profile then: ``torch/profiler/profiler.py`` says so, and
keeps CUPTI loaded where Inductor makes the graphs. This module keeps it loaded for PyGraph's graphs.
"""

from __future__ import annotations

import functools
import os

# As PyTorch sets them (`torch/__init__.py`, `_TorchCompileInductorWrapper`).
SETTINGS = {"DISABLE_CUPTI_LAZY_REINIT": "1", "TEARDOWN_CUPTI": "0"}


@functools.cache
def keep_cupti_loaded() -> None:
    """Keeps CUPTI loaded after profiles from now on, unless the environment says something else.

    Called when programs are compiled or wrapped, and not when graphs are recorded: other threads may
    read the environment then.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
