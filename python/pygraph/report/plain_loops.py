"""Training loops of a script that have no graph of their whole step, and the function to write.

The lines that train (loop_calls.py) are looked up in the program's source. If they lie in the body of
one loop, the statements from the forward to the last of them become a function: what they read and the
loop gives them are its arguments, and what is read later is its result. If they lie in a function
without a loop, that function is to be decorated.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from pygraph.observations import PlainLoop
from pygraph.report.loop_calls import BACKWARD, STEP, Calls

_MOVES = ("to", "cuda")  # methods by which a batch gets to the GPU, which a graph cannot do


def plain_loops(calls: Calls) -> list[PlainLoop]:
    """Of all files that train. Those whose source cannot be read are left out."""
    found = []
    for file in dict.fromkeys(file for _, file, _ in calls):
        lines = [(kind, line) for kind, of, line in calls if of == file]
        try:
            source = Path(file).read_text("utf-8")
            found += _in_file(file, source, ast.parse(source), lines)
        except (OSError, SyntaxError, ValueError):
            continue
    return found


def _in_file(
    file: str, source: str, tree: ast.Module, calls: Sequence[tuple[str, int]]
) -> list[PlainLoop]:
    by_scope: dict[ast.AST, list[tuple[str, int]]] = {}
    for kind, line in calls:
        scope = _scope_of(tree, line)
        if scope is not None:
            by_scope.setdefault(scope, []).append((kind, line))
    found = []
    for scope, inside in by_scope.items():
        if {BACKWARD, STEP} <= {kind for kind, _ in inside}:
            inside = sorted(inside, key=lambda call: call[1])
            of = f"{file}:{inside[0][1]}"
            seen = tuple(f"{kind} in line {line}" for kind, line in inside)
            found.append(PlainLoop(of, seen, _advice(source, scope, [line for _, line in inside])))
    return found


_Loop = (ast.For, ast.While)
_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


def _scope_of(tree: ast.Module, line: int) -> ast.AST | None:
    """The innermost loop or function around a line."""
    around = [
        node for node in ast.walk(tree) if isinstance(node, (*_Loop, *_Function)) and _holds(node, line)
    ]
    return max(around, key=lambda node: node.lineno, default=None)


def _holds(node: ast.AST, line: int) -> bool:
    first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", None) or 0
    return first <= line <= last


def _advice(source: str, scope: ast.AST, lines: Sequence[int]) -> str:
    if isinstance(scope, _Function):
        decorated = textwrap.dedent(_text(source, scope.lineno, scope.lineno))
        return f"@pygraph.graph\n{decorated}    ..."
    assert isinstance(scope, _Loop)
    last = max(i for i, statement in enumerate(scope.body) if any(_holds(statement, n) for n in lines))
    first = next(
        i for i, s in enumerate(scope.body) if any(_holds(s, n) for n in lines) or not _is_move(s)
    )
    before, step, after = scope.body[:first], scope.body[first : last + 1], scope.body[last + 1 :]
    target = [scope.target] if isinstance(scope, ast.For) else []
    given = _stored([*target, *before])
    arguments = [name for name in _read_first(step) if name in given]
    results = [name for name in _stored(step) if name in _loaded(after)]
    body = textwrap.indent(_statements(source, step), "    ")
    call = f"step({', '.join(arguments)})"
    parts = [f"@pygraph.graph\ndef step({', '.join(arguments)}):\n{body}"]
    if results:
        parts[0] += f"    return {', '.join(f'{name}.detach()' for name in results)}\n"
        call = f"{', '.join(results)} = {call}"
    head = textwrap.dedent(_text(source, scope.lineno, scope.body[0].lineno - 1))
    around = [_statements(source, before), f"{call}\n", _statements(source, after)]
    parts.append(head + textwrap.indent("".join(around), "    "))
    return "\n\n".join(parts).rstrip("\n")


def _is_move(statement: ast.stmt) -> bool:
    """Whether a statement does no more than give a name to something that is moved to the GPU."""
    if not isinstance(statement, ast.Assign):
        return False
    values = statement.value.elts if isinstance(statement.value, ast.Tuple) else [statement.value]
    return all(isinstance(value, (ast.Name, ast.Subscript)) or _is_moved(value) for value in values)


def _is_moved(value: ast.expr) -> bool:
    function = value.func if isinstance(value, ast.Call) else None
    return isinstance(function, ast.Attribute) and function.attr in _MOVES


def _names(nodes: Iterable[ast.AST]) -> Iterable[ast.Name]:
    """In the order of the source, but what is assigned after what is read for it."""
    for node in nodes:
        parts = list(ast.iter_child_nodes(node))
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and node.value is not None:
            parts = [node.value, *(part for part in parts if part is not node.value)]
        if isinstance(node, ast.Name):
            yield node
        yield from _names(parts)


def _stored(nodes: Iterable[ast.AST]) -> list[str]:
    return list(dict.fromkeys(n.id for n in _names(nodes) if isinstance(n.ctx, ast.Store)))


def _loaded(nodes: Iterable[ast.AST]) -> set[str]:
    return {n.id for n in _names(nodes) if isinstance(n.ctx, ast.Load)}


def _read_first(nodes: Iterable[ast.AST]) -> list[str]:
    """Names that are read before they are assigned."""
    read: dict[str, None] = {}
    stored: set[str] = set()
    for name in _names(nodes):
        if isinstance(name.ctx, ast.Store):
            stored.add(name.id)
        elif name.id not in stored:
            read[name.id] = None
    return list(read)


def _statements(source: str, statements: Sequence[ast.stmt]) -> str:
    if not statements:
        return ""
    last = statements[-1].end_lineno or statements[-1].lineno
    return textwrap.dedent(_text(source, statements[0].lineno, last))


def _text(source: str, first: int, last: int) -> str:
    return "".join(line + "\n" for line in source.splitlines()[first - 1 : last])
