"""The patches that the user asks for: option ``pygraph.patches``, or environment variable
PYGRAPH_PATCHES."""

from __future__ import annotations

import os
from typing import Any

from pygraph.torch_patches.table import PATCHES

VARIABLE = "PYGRAPH_PATCHES"
NONE, EXACT, ALL = "none", "exact", "all"


def parse(source: str, value: Any) -> frozenset[str]:
    """The names of the patches that a value stands for: "none", "exact", "all", or names with commas
    between them. Raises ValueError, which names `source` and all patches, for anything else.
    """
    if value == NONE:
        return frozenset()
    if value in (EXACT, ALL):
        return frozenset(patch.name for patch in PATCHES if patch.exact or value == ALL)
    names = {name.strip() for name in value.split(",")} if isinstance(value, str) else {""}
    known = [patch.name for patch in PATCHES]
    if not names <= set(known):
        raise ValueError(
            f"{source} takes none, exact, all, or names, with commas between them, out of "
            f"{', '.join(known)}; got {value!r}"
        )
    return frozenset(names)


def default() -> frozenset[str]:
    """For programs without the option. Raises ValueError where PYGRAPH_PATCHES has no such value."""
    return parse(VARIABLE, os.environ.get(VARIABLE, EXACT))
