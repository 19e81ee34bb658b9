"""``python -m pygraph program``: the program cannot tell it from ``python program``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import pygraph

_SHOW = """
import os, sys
main = sys.modules["__main__"]
print(sys.argv, sys.path, __name__, __file__, __package__, __cached__, __doc__, __builtins__)
print(main.__dict__ is globals(), sorted(globals()), type(__loader__).__name__)
print(__spec__ and (__spec__.name, __spec__.origin), [m for m in sys.modules if "torch" in m])
"""


def _run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False
    )


def _both(folder: Path, *program: str) -> subprocess.CompletedProcess[str]:
    """Runs the program both ways, compares, and returns the result with PyGraph."""
    plain = _run(folder, *program)
    ours = _run(folder, "-m", "pygraph", *program)
    assert ours.stdout == plain.stdout
    assert ours.returncode == plain.returncode
    # Before Python 3.13 the interpreter's own runpy frames begin the traceback of a module.
    assert ours.stderr == _without_runpy(plain.stderr)
    return ours


def _without_runpy(text: str) -> str:
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if "<frozen runpy>" not in line)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "show.py").write_text(_SHOW)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "__main__.py").write_text(_SHOW)
    (tmp_path / "package" / "part.py").write_text(_SHOW)
    return tmp_path


def test_a_script_sees_what_it_always_sees(folder: Path) -> None:
    done = _both(folder, "sub/show.py", "-m", "--summary", "explain", "x y")
    assert "['sub/show.py', '-m', '--summary', 'explain', 'x y']" in done.stdout


@pytest.mark.parametrize("name", ["package", "package.part"])
def test_a_module_sees_what_it_always_sees(folder: Path, name: str) -> None:
    assert "'--flag'" in _both(folder, "-m", name, "--flag").stdout


def test_a_link_to_a_script_imports_from_where_the_script_is(folder: Path) -> None:
    (folder / "link.py").symlink_to(folder / "sub" / "show.py")
    _both(folder, "link.py")


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(3)",
        "import sys; sys.exit('the reason')",
        "raise SystemExit",
        "def f(): raise ValueError('x')\nf()",
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise RuntimeError('y') from e",
        "import sys\nsys.excepthook = lambda t, e, tb: print(t, e)\nraise KeyError(1)",
        "x = = 1",
        "import json; json.loads('{')",
        "import atexit; atexit.register(print, 'the end'); raise ValueError",
        "import __main__; print(__main__.__file__); x = 3; print(__main__.x)",
        "import pickle\nclass A: pass\nprint(pickle.loads(pickle.dumps(A())).__class__ is A)",
        "from __future__ import annotations\nx: no_such_name = 1\nprint(__annotations__)",
        "y: int = 1\nprint(__annotations__)",
    ],
)
def test_ends_and_tracebacks_are_the_same(tmp_path: Path, code: str) -> None:
    (tmp_path / "program.py").write_text(code)
    _both(tmp_path, "program.py")
    _both(tmp_path, "-m", "program")


def test_an_interrupt_ends_as_an_interrupt(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("raise KeyboardInterrupt")
    assert _both(tmp_path, "program.py").returncode == -signal.SIGINT


def test_processes_that_a_program_spawns_find_its_functions(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import multiprocessing\n"
        "def double(x):\n    return 2 * x\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(double, [1, 2]))\n"
    )
    assert _both(tmp_path, "program.py").stdout == "[2, 4]\n"
    assert _both(tmp_path, "-m", "program").stdout == "[2, 4]\n"


@pytest.mark.parametrize(
    ("command", "status", "text"),
    [
        (["missing.py"], 2, "can't open file"),
        (["explain", "missing.py"], 2, "can't open file"),
        (["-m", "no_such_module"], 1, "No module named no_such_module"),
        (["-m", "json"], 1, "cannot be directly executed"),
        ([], 2, "name a script"),
        (["--no-such-option", "program.py"], 2, "name a script|unrecognized|usage"),
    ],
)
def test_a_missing_program_is_named(tmp_path: Path, command: list[str], status: int, text: str) -> None:
    done = _run(tmp_path, "-m", "pygraph", *command)
    assert done.returncode == status, done.stderr
    assert any(part in done.stderr for part in text.split("|")), done.stderr


def test_a_safe_path_stays_safe(folder: Path) -> None:
    if sys.version_info < (3, 11):
        pytest.skip("Python 3.11 brought -P")
    environment = {**os.environ, "PYTHONPATH": str(Path(pygraph.__file__).parents[1])}
    for command in (["sub/show.py"], ["-m", "pygraph", "sub/show.py"]):
        done = subprocess.run(
            [sys.executable, "-P", *command],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert str(folder / "sub'") not in done.stdout


def test_a_summary_without_pytorch(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("print('done')")
    done = _run(tmp_path, "-m", "pygraph", "--summary", "program.py")
    assert done.stdout == "done\n"
    assert done.stderr == "pygraph: the program did not import PyTorch\n"
