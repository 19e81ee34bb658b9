"""Identifies the installed version of a function, because PyTorch's functions change between releases.

A digest is one of what the function does: it leaves out comments, docstrings, annotations and layout.
It does not depend on Python's version either, as far as the syntax tree does not.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable
from typing import Any


def digest_of(functions: tuple[Callable[..., Any], ...]) -> str:
    """The digest of the functions' syntax trees: 16 hexadecimal digits; empty if one has no source."""
    try:
        sources = [textwrap.dedent(inspect.getsource(function)) for function in functions]
        text = "".join(_written(_Plain().visit(ast.parse(source))) for source in sources)
    except (OSError, TypeError, SyntaxError):
        return ""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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
