"""Information for PyTorch's compiler: PyGraph's own operators (bindings/tensors/operators.cc), and
operators that cannot be in graphs. What the compiler needs to trace the former is in
:mod:`pygraph.fx_passes.fake_operators`.
"""

from __future__ import annotations

import torch

from pygraph import runtime

# They always wait for the GPU, to see whether they converged. One of them in a partition would keep all
# of it uncaptured. (Not for what waits with some arguments only, as histc does without bounds.)
WAITING = ["aten::_linalg_eigh", "aten::_linalg_svd", "aten::linalg_eig"]

# Ranks communicate. Verifying a graph runs it more than once, which all ranks would have to do
# together; one that runs out of memory, or finds a result suspect, would leave the others waiting.
_COLLECTIVES = ("_c10d_functional::", "_c10d_functional_autograd::", "c10d::", "symm_mem::")

# PyGraph's own, which read CPU memory.
READING_CPU = ["pygraph::to_device", "pygraph::scalars_to_device"]


def is_collective(name: str) -> bool:
    """Whether ranks communicate in the operator with that name ("namespace::name")."""
    return name.startswith(_COLLECTIVES)


def outside_of_graphs() -> list[str]:
    """The operators, of those known so far, that Inductor must leave outside graphs."""
    names = torch._C._dispatch_get_all_op_names()
    return [*READING_CPU, *WAITING, *sorted(filter(is_collective, names))]


runtime.engine()  # registers the operators
