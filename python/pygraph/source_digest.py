"""Identifies the installed version of a function, because PyTorch's functions change between releases.

A digest covers what the function does: it leaves out comments, docstrings, annotations and layout. It
depends on Python's version only where the syntax tree does.

``inspect.getsource`` looks behind decorators. So a function that another package has wrapped, to trace
its calls for example, has no digest: nothing may take its place.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import inspect
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any


def digest_of(functions: tuple[Callable[..., Any], ...]) -> str:
    """The digest of the functions' syntax trees: 16 hexadecimal digits. Empty if one has no source, or
    has been wrapped by another package than its own."""
    try:
        if any(is_wrapped_by_others(function) for function in functions):
            return ""
        sources = [textwrap.dedent(inspect.getsource(function)) for function in functions]
        text = "".join(_written(_Plain().visit(ast.parse(source))) for source in sources)
    except (OSError, TypeError, ValueError, SyntaxError):
        return ""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_wrapped_by_others(function: Any) -> bool:
    """Whether another package than its own has wrapped the function."""
    own = _package(inspect.unwrap(function))
    while hasattr(function, "__wrapped__"):
        package = _package(function)
        if package not in (own, "pygraph", "typing_extensions", *sys.stdlib_module_names):
            return True
        if any(isinstance(held, contextlib.ContextDecorator) for held in _held(function)):
            return True  # a context of others, around each call
        function = function.__wrapped__
    return False


def _package(function: Any) -> str:
    """Where a function's code is from; empty for an object that only looks like a function. Its
    ``__module__`` is that of what it wraps, and so may be its ``__class__`` (of wrapt, for example)."""
    kind = type(function)
    if kind is types.MethodType:
        return _package(function.__func__)
    if kind is functools._lru_cache_wrapper:
        return "functools"
    if kind is not types.FunctionType:
        return ""
    return str(function.__globals__.get("__name__", "")).partition(".")[0]


def _held(function: Any) -> Iterator[Any]:
    """What the function has from the function around its definition."""
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # it is empty
            yield cell.cell_contents


class _Plain(ast.NodeTransformer):
    """Removes docstrings and annotations from a syntax tree."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        self.generic_visit(node)
        return None if node.value is None else ast.Assign(targets=[node.target], value=node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self._without_docstring(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        node.returns = None
        return self._without_docstring(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._without_docstring(node)

    def _without_docstring(self, node: Any) -> ast.AST:
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
        self.generic_visit(node)
        node.body = node.body or [ast.Pass()]
        return node  # type: ignore[no-any-return]


def _written(node: Any) -> str:
    """A syntax tree as text. Empty fields are left out, because newer Pythons have more of them."""
    if isinstance(node, list):
        return f"[{','.join(_written(item) for item in node)}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [
        f"{name}={_written(value)}" for name, value in ast.iter_fields(node) if value not in (None, [])
    ]
    return f"{type(node).__name__}({','.join(fields)})"
