"""The state of each patch in this process, for the user and for the log."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Iterator
from typing import Literal

from pygraph import runtime, signal_exceptions
from pygraph.torch_patches import selection, sources
from pygraph.torch_patches.table import PATCHES, REQUIRED, Patch

State = Literal["active", "off", "unknown source", "failed"]


@dataclasses.dataclass(frozen=True)
class PatchStatus:
    """One patch of PyTorch (docs/reference/patches.md).

    state: "active": in use, in at least one program. "off": no program asks for it, no program has been
        compiled with it yet, or it would gain nothing on the installed PyTorch. "unknown source":
        functions of the installed PyTorch are not the ones that the patch was written for. "failed": it
        raised an exception, which the program did not see, and PyTorch's own functions are used.
    reason: why it is not active; empty if it is.
    """

    name: str
    state: State
    reason: str

    def __str__(self) -> str:
        return f"{self.name:<18} {self.state}" + (f": {self.reason}" if self.reason else "")


@dataclasses.dataclass(frozen=True)
class Status:
    """The patches of PyTorch in this process. Prints as a table.

    patches: the patches that the option ``pygraph.patches`` switches, then the required ones, which
        cannot be switched off.
    """

    patches: tuple[PatchStatus, ...]

    def __str__(self) -> str:
        return "\n".join(str(patch) for patch in self.patches)


# Names of patches. Each change is one operation on a set or dictionary: whole, by Python's lock.
_asked_for: set[str] = set()
_used: set[str] = set()
_tried: set[str] = set()  # those that are applied once in the process
_failures: dict[str, str] = {}

_log_lock = threading.Lock()
_is_logged = False


def status() -> Status:
    """The state of each patch of PyTorch in this process. Thread-safe."""
    asked_for = frozenset(_asked_for.copy())
    with contextlib.suppress(ValueError):  # which the next compilation raises
        asked_for |= selection.default()
    asked_for |= {patch.name for patch in REQUIRED}
    rows = (PatchStatus(patch.name, *_state_of(patch, asked_for)) for patch in (*PATCHES, *REQUIRED))
    return Status(tuple(rows))


def _state_of(patch: Patch, asked_for: frozenset[str]) -> tuple[State, str]:
    if patch.name in _failures:
        return "failed", _failures[patch.name]
    if patch.name in _used:
        return "active", ""
    if patch.name not in asked_for:
        return "off", "not asked for by pygraph.patches"
    if patch.scope == "on demand" and patch.name not in _tried:  # to compare would load much of PyTorch
        return "off", "no program has needed it yet"
    reason = sources.why_not(patch)
    if reason:
        return "off" if sources.release() in patch.left_off else "unknown source", reason
    try:
        runtime.engine()
    except ImportError as error:
        return "off", str(error)
    return "off", "no program has been compiled with it yet"


def note_asked_for(names: frozenset[str]) -> None:
    """Notes patches that a program's options, or the defaults, ask for."""
    _asked_for.update(names)


def is_first_attempt(patch: Patch) -> bool:
    """Whether a patch that is applied once in the process has not been tried yet. Marks it as tried."""
    if patch.name in _tried:
        return False
    _tried.add(patch.name)
    return True


def why_not_used(patch: Patch) -> str:
    """Why the patch is not in use; empty if it is."""
    if patch.name in _used:
        return ""
    return _failures.get(patch.name) or sources.why_not(patch)


def note_used(patch: Patch) -> None:
    _used.add(patch.name)


def note_failure(name: str, error: Exception) -> None:
    """Notes that a patch failed. Logs each kind of error once."""
    _failures[name] = type(error).__name__
    with contextlib.suppress(Exception):  # of the error's text, or of a handler of the user's
        _failures[name] += f": {error}"
        runtime.notice_once(f"PyGraph leaves {name} to PyTorch: {_failures[name]}")


def log_once() -> None:
    """Logs which patches are active, and why the others are not; in the first call only."""
    global _is_logged
    with _log_lock:
        if _is_logged:
            return
        _is_logged = True
    rows = status().patches
    active = ", ".join(row.name for row in rows if row.state == "active") or "none"
    others = "; ".join(f"{row.name} {row.state} ({row.reason})" for row in rows if row.reason)
    runtime.note(
        logging.INFO, "patches of PyTorch: active: %s; not active: %s", active, others or "none"
    )


class Attempt:
    """One patch in one compilation. An error ends it: the rest of the compilation is PyTorch's own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.goes_on = True

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """A context that notes errors and does not raise them."""
        try:
            yield
        except Exception as error:
            signal_exceptions.pass_on(error)
            self.goes_on = False
            note_failure(self.name, error)
