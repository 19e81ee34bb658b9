"""Patches of PyTorch. Only speed depends on them, except for those in the table's ``REQUIRED``.

:mod:`.table` lists the patches, each with the versions of PyTorch's functions that it is known to fit.
A patch is applied only where the installed functions are those, and only where the user asks for it
(option ``pygraph.patches``, :mod:`.selection`) or it is required. :func:`install` applies those of the
process, :func:`apply` those of one compilation, :func:`provide` one on demand; :func:`status` returns
the state of each.
``python -m pygraph.torch_patches.check`` compares the table with the installed PyTorch.
"""

from pygraph.torch_patches.application import apply, install, provide
from pygraph.torch_patches.state import PatchStatus, Status, status

__all__ = ["PatchStatus", "Status", "apply", "install", "provide", "status"]
