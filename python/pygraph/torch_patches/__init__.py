"""Patches of PyTorch that make calls cheaper. Nothing but speed depends on them.

:mod:`.table` lists the patches, each with the versions of PyTorch's functions that it is known to fit.
A patch is applied only where the installed functions are those, and only where the user asks for it
(option ``pygraph.patches``, :mod:`.selection`). :func:`install` applies those of the process,
:func:`apply` those of one compilation; :func:`status` returns the state of each.
``python -m pygraph.torch_patches.check`` compares the table with the installed PyTorch.
"""

from pygraph.torch_patches.application import apply, install
from pygraph.torch_patches.state import PatchStatus, Status, status

__all__ = ["PatchStatus", "Status", "apply", "install", "status"]
