"""Makes PyGraph what ``torch.compile`` uses where a program asks for Inductor, or for nothing.

The function ``torch.compile`` is replaced, in the same way in every supported release: as a decorator,
as ``Module.compile``, and in libraries. From 2.13 on, ``torch.compiler.set_default_backend`` has the
same effect on programs that name no backend. This module imports no PyTorch: it waits until the program
does.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

# Options of Inductor with which PyGraph has no graphs to offer: such programs get what they ask for.
_NOT_FOR_GRAPHS = (
    ("triton.cudagraphs", False),
    ("cpp_wrapper", True),
    ("fx_wrapper", True),
    ("use_aoti", True),
)


def install(before_use: Callable[[], None] | None = None) -> None:
    """Replaces ``torch.compile``, now or right after PyTorch has been imported.

    before_use: called before each call of ``torch.compile`` that uses PyGraph.
    """
    if "torch" in sys.modules:
        _replace(sys.modules["torch"], before_use)
    else:
        sys.meta_path.insert(0, _TorchFinder(before_use))


def _replace(torch: ModuleType, before_use: Callable[[], None] | None) -> None:
    compile_ = torch.compile

    @functools.wraps(compile_)
    def with_pygraph(*args: Any, **kwargs: Any) -> Any:
        backend = _resolved(torch, kwargs.get("backend"))
        if backend == "inductor" and _may_have_graphs(kwargs.get("options")):
            _check_as_inductor(torch, kwargs)
            kwargs["backend"] = backend = "pygraph"
        if before_use is not None and backend == "pygraph":
            before_use()
        return compile_(*args, **kwargs)

    torch.compile = with_pygraph  # type: ignore[attr-defined]


def _resolved(torch: ModuleType, backend: object) -> str:
    """The backend's name; empty if it is a function."""
    if backend is None:  # the default, which a program may set from PyTorch 2.13 on
        backend = getattr(torch.compiler, "get_default_backend", lambda: "inductor")()
    return backend if isinstance(backend, str) else ""


def _check_as_inductor(torch: ModuleType, given: dict[str, Any]) -> None:
    """Raises the exceptions of ``torch.compile`` for a mode or an option that Inductor does not
    know."""
    mode, options = given.get("mode"), given.get("options")
    check = getattr(torch, "_TorchCompileInductorWrapper", None)
    if check is not None and (mode is None) != (options is None):
        check(mode, options, given.get("dynamic"))


def _may_have_graphs(options: Any) -> bool:
    if not isinstance(options, dict):
        return True
    given = {str(name).replace("-", "_"): value for name, value in options.items()}
    return all(given.get(name, not value) != value for name, value in _NOT_FOR_GRAPHS)


class _TorchFinder(importlib.abc.MetaPathFinder):
    """Finds PyTorch as the other finders do, and replaces ``torch.compile`` once it is loaded."""

    def __init__(self, before_use: Callable[[], None] | None) -> None:
        self._before_use = before_use

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        for finder in sys.meta_path:
            # As Python does, which leaves finders of another kind out.
            find: Any = None if finder is self else getattr(finder, "find_spec", None)
            spec: importlib.machinery.ModuleSpec | None = find and find(name, path, target)
            if spec is not None:
                self._replace_after_loading(spec.loader)
                return spec
        return None

    def _replace_after_loading(self, loader: Any) -> None:
        load = getattr(loader, "exec_module", None)
        if load is None:
            return

        def exec_module(module: ModuleType) -> None:
            load(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _replace(module, self._before_use)

        loader.exec_module = exec_module
