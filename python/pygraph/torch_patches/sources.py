"""Compares the installed PyTorch with the sources that the patches were written for."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from typing import Any, Literal

from pygraph.engine import release as release
from pygraph.torch_patches.digests import DIGESTS, GONE
from pygraph.torch_patches.stored_digests import StoredDigests
from pygraph.torch_patches.table import PATCHES, Patch


@dataclasses.dataclass(frozen=True)
class Difference:
    """A part of PyTorch, by its dotted name, that is not the known one."""

    name: str
    kind: Literal["changed", "gone"]

    def __str__(self) -> str:
        return f"{self.name} {'has changed' if self.kind == 'changed' else 'is gone'}"


def resolve(name: str) -> Any:
    """The object that a dotted name stands for. Raises ImportError or AttributeError if there is
    none."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError as error:
            if count == 1 or not name.startswith(f"{error.name}"):
                raise
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise ImportError(name)


def digest(name: str, stored: StoredDigests | None = None) -> str:
    """The digest of the source of the named object: empty for a value, "gone" if it does not exist.
    stored: has digests of patches on demand, which are not among those that all processes need."""
    digests = _digests()
    return digests[name] if name in digests else _digest(name, stored or StoredDigests("others"))


@functools.cache
def _digests() -> dict[str, str]:
    """Of all names in the table, before the first of them is replaced; but not of patches on demand,
    whose modules are not loaded before. (These wrap a function, so that its source is still found.)"""
    stored = StoredDigests("all")
    patches = [patch for patch in PATCHES if patch.scope != "on demand"]
    found = {name: _digest(name, stored) for patch in patches for name in patch.names}
    stored.save()
    return found


def _digest(name: str, stored: StoredDigests) -> str:
    try:
        found = resolve(name)
    except Exception:  # of an import, too
        return GONE
    return stored.digest_of(found) if inspect.isroutine(found) or inspect.isclass(found) else ""


def known_digest(name: str, release: str) -> str:
    """The digest that the patches were compared with, for a name on that release."""
    number = _number(release)
    since = [first for first in DIGESTS[name] if _number(first) <= number]
    return DIGESTS[name][max(since, key=_number)]


def _number(release: str) -> list[int]:
    return [int(part) for part in release.split(".")]


def differences(patch: Patch, release: str) -> list[Difference]:
    """The parts of the installed PyTorch that differ from the release that the patch fits."""
    found = []
    stored = StoredDigests(patch.name) if patch.scope == "on demand" else None
    for name in patch.names:
        actual = digest(name, stored)
        if actual != known_digest(name, release):
            found.append(Difference(name, "gone" if actual == GONE else "changed"))
    if stored is not None:
        stored.save()
    return found


def why_not(patch: Patch) -> str:
    """Why the patch cannot be applied to the installed PyTorch; empty if it can."""
    if release() in patch.left_off:
        return patch.left_off[release()]
    if release() not in patch.releases:
        return f"not known to fit PyTorch {release()}"
    return ", ".join(str(difference) for difference in differences(patch, release()))
