"""The keys of PyTorch's and of Triton's own code, kept on disk beside Inductor's cache.

The compiler's caches are for one version of that code: each key in them contains a hash of its files.
Each process reads all files for it, among them Triton's library of 500 MB, which takes some 0.45 s. A
hash on disk is used instead if all files, and all folders in which files could be added, have the
inodes, sizes and times that they had before it was computed. In all other cases, and after any error,
PyTorch computes it, if it needs it, and it is stored. Nothing here raises, but for an unknown source at
the beginning.

As with everything that Inductor keeps, ``TORCHINDUCTOR_FORCE_DISABLE_CACHES=1`` switches this off.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.runtime.cache_dir_utils import cache_dir

from pygraph import stored
from pygraph.runtime import log
from pygraph.torch_patches import hashed_files
from pygraph.torch_patches.stored_digests import StoredDigests

# Of the function behind PyTorch's cache of its one result, which the table of patches cannot name.
_KNOWN = ("677e589d16daf11b",)
_FORMAT = 1  # of what is stored: another one where other files, or other facts of them, are looked at
_SETTLED_SECONDS = 10.0  # files that changed within them may do so again, at the same time of the clock

_State = list[int] | None  # of a file or folder; None if it does not exist


class StoredKey:
    """A key on disk, with the states of all that it is computed from."""

    def __init__(self, name: str, paths: Callable[[], Iterable[str]]) -> None:
        """name: what the key is of, and where. paths: of the files, and of the folders in which a new
        file would change the key."""
        self._paths = paths
        self._name = name
        self._states: dict[str, _State] | None = None
        self._noted_at = 0.0

    def find(self) -> str:
        """The key; empty if it is to be computed."""
        try:
            found = stored.read(_path(self._name))
            key, states = found["key"], found["states"]
            if isinstance(key, str) and states and all(_state(p) == s for p, s in states.items()):
                return key
        except FileNotFoundError:
            pass
        except Exception as error:
            log.debug("a key on disk cannot be read: %s", error)
        return ""

    def note(self) -> None:
        """To be called before the key is computed, where it is to be kept."""
        try:
            self._noted_at = time.time()
            self._states = {path: _state(path) for path in self._paths()}
        except Exception as error:
            log.debug("no key is kept: %s", error)

    def keep(self, key: str) -> None:
        """Stores the key, unless one of its files had changed a moment before they were noted, or has
        no time of change (:func:`pygraph.stored.has_time_of_change`)."""
        states, self._states = self._states, None
        try:
            known = [state for state in (states or {}).values() if state is not None]
            if known and all(_is_settled(state, self._noted_at) for state in known):
                stored.write(_path(self._name), {"key": key, "states": states})
        except Exception as error:  # the folder cannot be written
            log.debug("a key was not kept: %s", error)


def _path(name: str) -> Path:
    parts = (name, torch.__version__, sys.version, hashed_files.SUFFIXES, _FORMAT)
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
    return Path(cache_dir()) / "pygraph" / f"key-{digest}.json"


def _state(path: str) -> _State:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _is_settled(state: list[int], at: float) -> bool:
    changed = max(state[2:]) / 1e9
    return stored.has_time_of_change(state[3]) and changed + _SETTLED_SECONDS < at


def _torch_key_so_far() -> str | None:
    """Empty if it is not known yet; None if it is being computed."""
    from torch._inductor import codecache

    cache = inspect.getclosurevars(codecache.torch_key).nonlocals
    if isinstance(cache["_cache"], bytes):
        return cache["_cache"].hex()
    return None if cache["_lock"].locked() or cache["_future"] is not None else ""


def _triton_key_so_far(original: Any) -> str | None:
    """As of PyTorch's, for the function that computes it. A call is counted when it begins."""
    cached = original.cache_info()
    if cached.currsize:
        return str(original())
    return None if cached.misses else ""


# With functions that return the key, or nothing before it has been computed.
_to_keep: list[tuple[StoredKey, Callable[[], str | None]]] = []


@functools.cache
def install() -> None:
    """Gives PyTorch the keys that are on disk. Raises RuntimeError if it computes them in a way that
    is not known."""
    from torch._inductor import codecache
    from torch._inductor.runtime import triton_compat

    compute = inspect.getclosurevars(codecache.torch_key).nonlocals
    digests = StoredDigests("torch_key")
    if digests.digest_of(compute["func"]) not in _KNOWN:
        raise RuntimeError("torch_key is computed in another way")
    digests.save()
    if config.force_disable_caches or config.is_fbcode():
        return
    original = triton_compat.triton_key

    def set_torch_key(key: str) -> None:
        codecache.torch_key.set(bytes.fromhex(key))

    def set_triton_key(key: str) -> None:
        triton_compat.triton_key = _known_at_first(original, key)

    key = StoredKey(f"torch {torch.__file__}", hashed_files.of_torch)
    _install(key, _torch_key_so_far, set_torch_key)
    key = StoredKey(f"triton {inspect.getfile(inspect.unwrap(original))}", hashed_files.of_triton)
    _install(key, functools.partial(_triton_key_so_far, original), set_triton_key)


def _install(key: StoredKey, so_far: Callable[[], str | None], use: Callable[[str], None]) -> None:
    """Gives PyTorch the key. If it is not on disk, the states of its files are noted before PyTorch
    begins to compute it."""
    try:
        if so_far() == "":
            found = key.find()
            if found:
                use(found)
                return
            key.note()
            if so_far() == "":
                _to_keep.append((key, so_far))
    except Exception as error:  # another thread has computed it, or what is on disk is no key
        log.debug("a key on disk is not used: %s", error)


def _known_at_first(original: Any, key: str) -> Any:
    """The function with its result in its cache. If the cache is cleared, it is computed."""
    known = [key]
    function = functools.cache(lambda: known.pop() if known else original())
    function()
    return functools.update_wrapper(function, original)


def keep() -> None:
    """To be called after a program has been looked up in the compiler's caches, which computes the
    keys: stores those that were not on disk. Computes none. Threads may call it at the same time."""
    for entry in tuple(_to_keep):
        key, so_far = entry
        try:
            found = so_far()
            if found:
                _to_keep.remove(entry)
                key.keep(found)
        except Exception as error:  # of an entry that another thread has removed, too
            log.debug("a key was not kept: %s", error)
