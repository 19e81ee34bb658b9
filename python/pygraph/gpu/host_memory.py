"""Limits the temporary use of host memory, because running out of it cannot be caught."""

from __future__ import annotations

import os
import pathlib

_SHARE = 4  # the inverse of the share of the free memory for each of a node's ranks
_UNKNOWN = 1 << 62


def has_room(wanted: int, root: pathlib.Path = pathlib.Path("/")) -> bool:
    """Whether ``wanted`` bytes are a small part of the memory that this process can still get.

    Other ranks on the host are expected to ask at the same time. root: of the file system, for tests.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # set by torchrun
    return wanted * _SHARE * ranks <= _available(root)


def _available(root: pathlib.Path) -> int:
    """Bytes left on the machine, and within a container's limit (either version of control groups)."""
    groups = root / "sys/fs/cgroup"
    return min(
        1024 * _number_in(root / "proc/meminfo", _UNKNOWN, after="MemAvailable:"),
        _number_in(groups / "memory.max", _UNKNOWN) - _number_in(groups / "memory.current", 0),
        _number_in(groups / "memory/memory.limit_in_bytes", _UNKNOWN)
        - _number_in(groups / "memory/memory.usage_in_bytes", 0),
    )


def _number_in(path: pathlib.Path, default: int, after: str = "") -> int:
    """The number that a file begins with, or that follows a word in it."""
    try:
        text = path.read_text()
        return int(text[text.index(after) + len(after) :].split(maxsplit=1)[0])
    except (OSError, ValueError, IndexError):
        return default
