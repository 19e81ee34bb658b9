"""What tensors tell besides what a graph's signature has: where they lie in their memory, how often
they were written, whether they are views.

These may differ between calls that are alike otherwise, and a replay does not ask. To compare them at
each call would give each part of a larger tensor a graph of its own. So a callable has no graph if the
program's own code names one of them. (``data_ptr`` and ``as_strided`` may be named: programs pass
addresses to their own kernels, and most layouts are relative to the tensor.)
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Sequence
from types import CodeType

import torch

from pygraph.callables.host.user_code import is_class_of_program, is_library_file, with_inner
from pygraph.callables.host.walk import Reachable

_OF_ARGUMENTS = frozenset(("_base", "_is_view", "storage_offset", "untyped_storage"))
_OF_HISTORIES = frozenset(("is_leaf", "grad_fn"))  # a recording is given tensors without one
_OF_ALL = frozenset(("_version",))
_BY_TEXT = frozenset(("getattr", "hasattr", "attrgetter", "methodcaller"))


def read_property(found: Reachable, passed: Sequence[torch.Tensor]) -> str:
    """The reason if the program's own code among what a callable reaches may ask tensors for such a
    thing; empty if not. passed: the tensors among the arguments."""
    own = [f for f in found.running if not is_library_file(f.__code__.co_filename)]
    wanted = (_OF_ALL | _OF_ARGUMENTS) if passed else _OF_ALL
    if any(tensor.requires_grad and not tensor.is_leaf for tensor in passed):
        wanted |= _OF_HISTORIES
    reading = [(f, read & wanted) for f in own if (read := _uses(f.__code__)[0]) & wanted]
    if not reading:
        return ""
    # Attributes of the program's own objects are no tensors': nobody can set those.
    theirs = frozenset[str]().union(*(_uses(f.__code__)[1] for f in own))
    for class_ in found.classes:
        if is_class_of_program(class_):
            theirs |= wanted & vars(class_).keys()
    for function, names in reading:
        for name in sorted(names - theirs):
            code = function.__code__
            return (
                f"{code.co_name} ({code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno}) reads "
                f"{name} of a tensor, which may differ between calls that share a graph; read it "
                "outside and pass the number"
            )
    return ""


@functools.lru_cache(maxsize=4096)
def _uses(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The names that a function, or one inside of it, may read of an object, and that it sets."""
    read: set[str] = set()
    stored: set[str] = set()
    for part in with_inner(code):
        names = _named(part)
        if names:
            found = list(dis.get_instructions(part))
            stored |= {str(i.argval) for i in found if i.opname == "STORE_ATTR"} & names
            read |= names
    return frozenset(read), frozenset(stored)


def _named(code: CodeType) -> set[str]:
    names = set(code.co_names)
    if names & _BY_TEXT:
        names |= {text for text in code.co_consts if type(text) is str}
    return names & (_OF_ALL | _OF_ARGUMENTS | _OF_HISTORIES)
