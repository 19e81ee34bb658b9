"""The command line: ``python -m pygraph``, or ``pygraph``.

pygraph [--summary] script.py ...    run a script with PyGraph
pygraph [--summary] -m module ...    the same for a module
pygraph explain script.py ...        run it, then report what ran in graphs

Imports PyTorch only for ``explain``: else the program is the first to do so.
"""

from __future__ import annotations

import argparse
import atexit
import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from pygraph import default_backend, launch

_USAGE = """\
%(prog)s [-h] [--summary] (script.py | -m module) [arguments ...]
       %(prog)s explain [--html] [--json] [--output FILE] (script.py | -m module) [arguments ...]"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status. Raises what the program raises."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return _explain(argv[1:]) if argv[:1] == ["explain"] else _run(argv)
    except launch.NotFoundError as error:
        print(f"pygraph: {error}", file=sys.stderr)
        return error.status


def _run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="pygraph",
        usage=_USAGE,
        description="Runs a program. torch.compile uses PyGraph where it would use Inductor.",
    )
    parser.add_argument("--summary", action="store_true", help="print one line at the end, to stderr")
    options, target, arguments, is_module = _parse(parser, argv)
    default_backend.install(_begin_summary if options.summary else None)
    if options.summary:
        atexit.register(_print_summary, os.getpid())
    launch.run(target, arguments, is_module)
    return 0


def _explain(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="pygraph explain",
        description="Runs a program with torch.compile using PyGraph, then reports what ran in graphs, "
        "and why the rest did not.",
    )
    parser.add_argument("--html", action="store_true", help="write a page and open it in a browser")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--output", type=Path, help="where --html writes (default: SCRIPT.html)")
    options, target, arguments, is_module = _parse(parser, argv)

    import torch

    from pygraph.observations import observing
    from pygraph.report.loop_calls import noting_calls
    from pygraph.report.script import report_on

    status = 0
    before = sys.path.copy(), sys.modules["__main__"], torch.compile
    default_backend.install()
    with observing() as observation, noting_calls() as calls:
        try:
            launch.run(target, arguments, is_module)
        except SystemExit as exit_:
            status = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        finally:
            sys.path[:], sys.modules["__main__"], torch.compile = before
    report = report_on(target if is_module else Path(target).name, observation, calls)
    print(report.to_json() if options.json else report)
    if options.html:
        path = options.output or (
            Path(f"{target}.html") if is_module else Path(target).with_suffix(".html")
        )
        report.save(path)
        print(f"written to {path}", file=sys.stderr)
        webbrowser.open(path.resolve().as_uri())
    return status


def _parse(
    parser: argparse.ArgumentParser, argv: list[str]
) -> tuple[argparse.Namespace, str, list[str], bool]:
    """The options, the program's name, its arguments, and whether it is a module. All that follows a
    script's name, or -m, belongs to the program."""
    rest = argparse.REMAINDER
    parser.add_argument("-m", dest="module", nargs=rest, metavar="module", help="run a module")
    parser.add_argument("script", nargs=rest, metavar="script.py", help="and its arguments")
    options = parser.parse_args(argv)
    is_module = options.module is not None
    words = options.module if is_module else options.script
    if not words:
        parser.error("name a script, or -m and a module")
    return options, words[0], words[1:], is_module


def _begin_summary() -> None:
    from pygraph.report import summary

    summary.begin()


def _print_summary(process: int) -> None:
    if os.getpid() != process:  # a forked child
        return
    if "torch" not in sys.modules:
        print("pygraph: the program did not import PyTorch", file=sys.stderr)
        return
    # Importing it, and with it PyTorch's compiler, is not possible any more.
    summary = sys.modules.get("pygraph.report.summary")
    line = "torch.compile was not called with PyGraph" if summary is None else summary.line()
    print(f"pygraph: {line}", file=sys.stderr)
