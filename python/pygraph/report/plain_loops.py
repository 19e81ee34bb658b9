"""Training loops of a script that have no graph of their whole step, and the function to write.

The lines that train (loop_calls.py) are looked up in the program's source. If they lie in the body of
one loop, the statements from the forward to the last of them become a function: what they read and the
loop gives them are its arguments, and what is read later is its result; what they read and then change
is both. If they lie in a function without a loop, that function is to be decorated. Statements that
leave the loop cannot be in a function; then the advice is to move them.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pygraph.observations import PlainLoop
from pygraph.report.loop_calls import BACKWARD, STEP, Calls

_MOVES = ("to", "cuda")  # methods by which a batch gets to the GPU, which a graph cannot do


def plain_loops(calls: Calls) -> list[PlainLoop]:
    """The training loops of all files that train. Files whose source cannot be read are left out."""
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
            advice = _advice(source, tree, scope, [line for _, line in inside])
            found.append(PlainLoop(of, seen, advice))
    return found


_Loop = (ast.For, ast.AsyncFor, ast.While)
_Function = (ast.FunctionDef, ast.AsyncFunctionDef)
_Leaving = (ast.Break, ast.Continue, ast.Return, ast.Yield, ast.YieldFrom, ast.Await)


def _scope_of(tree: ast.Module, line: int) -> ast.AST | None:
    """The innermost loop or function around a line."""
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (*_Loop, *_Function))
        if any(_holds(statement, line) for statement in node.body)
    ]
    return max(around, key=lambda node: (node.lineno, node.col_offset), default=None)


def _holds(node: ast.AST, line: int) -> bool:
    first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", None) or 0
    return first <= line <= last


def _advice(source: str, tree: ast.Module, scope: ast.AST, lines: Sequence[int]) -> str:
    if isinstance(scope, ast.AsyncFunctionDef):
        return "# A graph cannot wait: put what trains into a function without `async`."
    if isinstance(scope, ast.FunctionDef):
        decorated = ast.parse(f"def {scope.name}(): ...").body[0]
        assert isinstance(decorated, ast.FunctionDef)
        decorated.args, decorated.returns = scope.args, scope.returns
        return f"@pygraph.graph\n{ast.unparse(decorated)}"
    assert isinstance(scope, _Loop)
    last = max(i for i, statement in enumerate(scope.body) if any(_holds(statement, n) for n in lines))
    first = next(
        i for i, s in enumerate(scope.body) if any(_holds(s, n) for n in lines) or not _is_move(s)
    )
    before, step, after = scope.body[:first], scope.body[first : last + 1], scope.body[last + 1 :]
    leaving = next(_leaving(step), None)
    if leaving is not None:
        word = type(leaving).__name__.removesuffix("From").lower()
        return (
            f"# A step cannot have the `{word}` of line {leaving.lineno}: move it out of what trains."
        )
    target = [] if isinstance(scope, ast.While) else [scope.target]
    read, stored = _read_first(step), _stored(step)
    given = {*_stored([*target, *before]), *stored}
    arguments = [name for name in read if name in given]
    later = _loaded(after) | _loaded_later(tree, scope)
    results = [name for name in stored if name in later or name in arguments]
    body = textwrap.indent(_statements(source, step), "    ")
    function = _free_name(tree)
    call = f"{function}({', '.join(arguments)})"
    parts = [f"@pygraph.graph\ndef {function}({', '.join(arguments)}):\n{body}"]
    if results:
        numbers = _numbers_in(step)
        returned = [name if name in numbers else f"{name}.detach()" for name in results]
        parts[0] += f"    return {', '.join(returned)}\n"
        call = f"{', '.join(results)} = {call}"
    head = _head(scope)
    around = [_statements(source, before), f"{call}\n", _statements(source, after)]
    parts.append(head + textwrap.indent("".join(around), "    "))
    return "\n\n".join(parts).rstrip("\n")


def _is_move(statement: ast.stmt) -> bool:
    """Whether a statement does no more than give a name to something that is moved to the GPU, or that
    an iterator gives."""
    if not isinstance(statement, ast.Assign):
        return False
    values = statement.value.elts if isinstance(statement.value, ast.Tuple) else [statement.value]
    return all(isinstance(value, (ast.Name, ast.Subscript)) or _is_moved(value) for value in values)


def _is_moved(value: ast.expr) -> bool:
    function = value.func if isinstance(value, ast.Call) else None
    if isinstance(function, ast.Name):
        return function.id == "next"
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
    return {n.id for n in _names(nodes) if not isinstance(n.ctx, ast.Store)}


def _loaded_later(tree: ast.Module, scope: ast.For | ast.AsyncFor | ast.While) -> set[str]:
    """Names that are read after the loop, in the function around it."""
    around = [n for n in ast.walk(tree) if isinstance(n, _Function) and _holds(n, scope.lineno)]
    body = max(around, key=lambda node: node.lineno).body if around else tree.body
    last = scope.end_lineno or scope.lineno
    return {n.id for n in _names(body) if n.lineno > last and not isinstance(n.ctx, ast.Store)}


def _leaving(nodes: Iterable[ast.AST], of_loop: bool = False) -> Iterator[ast.stmt | ast.expr]:
    """Statements that leave the given ones, except for those inside a function or loop of theirs."""
    for node in nodes:
        is_of_loop = isinstance(node, (ast.Break, ast.Continue)) and of_loop
        if isinstance(node, _Leaving) and not is_of_loop:
            yield node
        if not isinstance(node, (*_Function, ast.Lambda)):
            yield from _leaving(ast.iter_child_nodes(node), of_loop or isinstance(node, _Loop))


def _free_name(tree: ast.Module) -> str:
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    used |= {n.name for n in ast.walk(tree) if isinstance(n, (*_Function, ast.ClassDef))}
    return next(name for name in ("step", "train_step", "graphed_step") if name not in used)


def _numbers_in(nodes: Sequence[ast.AST]) -> set[str]:
    """Names that the statements give a number or text, as far as that can be read off."""
    found = set()
    for node in (part for of in nodes for part in ast.walk(of)):
        if not isinstance(node, (ast.Assign, ast.AugAssign)):
            continue
        value = node.value
        function = value.func if isinstance(value, ast.Call) else None
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if isinstance(value, ast.Constant) or name in ("item", "int", "float", "len"):
            found.update(_stored([node]))
    return found


def _read_first(nodes: Sequence[ast.AST]) -> list[str]:
    """Names that are read before they are assigned."""
    every = [part for node in nodes for part in ast.walk(node)]
    changed = [node.target for node in every if isinstance(node, ast.AugAssign)]
    read: dict[str, None] = {}
    stored: set[str] = set()
    for name in _names(nodes):
        if isinstance(name.ctx, ast.Store) and name not in changed:
            stored.add(name.id)
        elif name.id not in stored:
            read[name.id] = None
    return list(read)


def _statements(source: str, statements: Sequence[ast.stmt]) -> str:
    """With comments, unless something else is on the lines, or text that must not be indented."""
    if not statements:
        return ""
    first, last = statements[0], statements[-1]
    lines = source.split("\n")  # as Python counts them
    end = last.end_lineno or last.lineno
    is_alone = not lines[first.lineno - 1].encode()[: first.col_offset].strip()
    rest = lines[end - 1].encode()[last.end_col_offset or 0 :].strip()
    if not is_alone or rest[:1] not in (b"", b"#") or any(map(_has_text_in_lines, statements)):
        return "".join(ast.unparse(statement) + "\n" for statement in statements)
    return textwrap.dedent("".join(line + "\n" for line in lines[first.lineno - 1 : end]))


def _has_text_in_lines(statement: ast.stmt) -> bool:
    return any(
        isinstance(node, (ast.Constant, ast.JoinedStr)) and node.lineno != node.end_lineno
        for node in ast.walk(statement)
    )


def _head(loop: ast.For | ast.AsyncFor | ast.While) -> str:
    """The source of the loop, up to its body."""
    if isinstance(loop, ast.While):
        return f"while {ast.unparse(loop.test)}:\n"
    word = "async for" if isinstance(loop, ast.AsyncFor) else "for"
    target = ast.unparse(loop.target).removeprefix("(").removesuffix(")")
    return f"{word} {target} in {ast.unparse(loop.iter)}:\n"
