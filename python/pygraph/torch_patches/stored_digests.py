"""Digests of PyTorch's functions (:mod:`pygraph.source_digest`), kept on disk beside Inductor's cache.

To read and parse the functions that the patches name takes some 0.2 s in each process. What a digest is
of depends on a file's contents and on a place in it. So it is stored under the path of the file, its
inode, size and times, and the place; a file of digests belongs to one installation of PyTorch, one
version of Python, and the code that computes digests. Everything that cannot be stored is computed.
Whether another package has wrapped a function is looked at each time. Nothing here raises.

As with everything that Inductor keeps, ``TORCHINDUCTOR_FORCE_DISABLE_CACHES=1`` switches this off.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from pygraph import source_digest, stored
from pygraph.runtime import log


class StoredDigests:
    """The digests of one installation in one file, as far as they are known."""

    def __init__(self, file: str) -> None:
        """file: what the digests are for. Those that another process asks for are in other files."""
        self._path: Path | None = None
        self._known: dict[str, str] = {}
        self._used: dict[str, str] = {}
        try:
            if not config.force_disable_caches:
                self._path = _path(file)
                self._known = _checked(stored.read(self._path))
        except FileNotFoundError:
            pass
        except Exception as error:
            log.debug("digests on disk cannot be read: %s", error)

    def digest_of(self, *functions: Any) -> str:
        """As of :func:`pygraph.source_digest.digest_of`."""
        try:
            if any(source_digest.is_wrapped_by_others(function) for function in functions):
                return ""
        except Exception:  # of what others have made of it
            return ""
        places = [_place(function) for function in functions] if self._path is not None else []
        place = " and ".join(places) if all(places) else ""
        digest = self._known.get(place) or source_digest.digest_of(functions)
        if place and digest:
            self._used[place] = digest
        return digest

    def save(self) -> None:
        """Stores the digests that were asked for, if others are stored."""
        try:
            if self._path is not None and self._used != self._known:
                stored.write(self._path, self._used)
        except Exception as error:
            log.debug("digests were not kept: %s", error)


def _path(file: str) -> Path:
    own = os.stat(source_digest.__file__)
    parts = (torch.__file__, torch.__version__, torch.version.git_version, sys.version, own.st_mtime_ns)
    name = hashlib.sha256(repr((*parts, own.st_size, own.st_ino, file)).encode()).hexdigest()[:32]
    # Not cache_dir(), which sets the variable: a program may set it after it has imported PyGraph.
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()
    return Path(folder) / "pygraph" / f"digests-{name}.json"


def _checked(data: Any) -> dict[str, str]:
    """Raises ValueError if it is not what was stored."""
    if not isinstance(data, dict) or not all(_is_digest(digest) for digest in data.values()):
        raise ValueError("not a table of digests")
    return data


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 16 and int(value, 16) >= 0


def _place(function: Any) -> str:
    """The file and the place in it that ``inspect.getsource`` reads; empty if there is none."""
    try:
        source = inspect.unwrap(function)
        path = inspect.getsourcefile(source)
        if path is None:
            return ""
        if inspect.isclass(source):
            line = source.__dict__.get("__firstlineno__")  # from Python 3.13 on
        else:
            line = getattr(source, "__func__", source).__code__.co_firstlineno
        return f"{_file(path)} {source.__qualname__} {line}"
    except Exception:
        return ""


@functools.lru_cache(maxsize=256)
def _file(path: str) -> str:
    """Raises OSError if there is no such file, or if a change of it might not be noticed."""
    found = os.stat(path)
    if not stored.has_time_of_change(found.st_ctime_ns):
        raise OSError(f"no time of change: {path}")
    return f"{path} {found.st_ino} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"
