"""A key on disk is the one that would be computed; after a change in its files it is computed."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch._inductor import codecache

from pygraph.torch_patches import hashed_files, sources, stored_keys
from pygraph.torch_patches.hashed_files import modules_in
from pygraph.torch_patches.stored_keys import StoredKey
from pygraph.torch_patches.table import PATCHES

(PATCH,) = (patch for patch in PATCHES if patch.name == "stored_keys")
known_here = pytest.mark.skipif(
    sources.release() not in PATCH.releases, reason="PyTorch's keys are not known"
)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with one of its own, a folder that is none, and files that settled long ago."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(stored_keys, "_SETTLED_SECONDS", -1.0)
    folder = tmp_path / "package"
    for name in ("__init__.py", "module.py", "inner/__init__.py", "inner/module.py", "data/text"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("text")
    (folder / "linked").symlink_to(tmp_path / "linked")  # which does not exist yet
    return folder


def _key(package: Path) -> StoredKey:
    """As another process makes it."""
    return StoredKey(f"a test {package}", lambda: modules_in(str(package)))


def _kept(package: Path, key: str = "the key") -> str:
    first = _key(package)
    assert first.find() == ""
    first.note()
    first.keep(key)
    return _key(package).find()


def test_another_process_finds_the_key(package: Path) -> None:
    assert _kept(package) == "the key"


def _same_size_and_time(package: Path) -> None:
    path = package / "inner/module.py"
    found = path.stat()
    path.write_text("TEXT")
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def _at_the_end_of_a_link(package: Path) -> None:
    (package.parent / "linked").mkdir()
    (package.parent / "linked/__init__.py").write_text("text")


def _replaced(package: Path) -> None:
    (package / "new.txt").write_text("text")
    (package / "new.txt").replace(package / "module.py")


@pytest.mark.parametrize(
    "change",
    [
        lambda p: (p / "module.py").write_text("other"),
        _same_size_and_time,
        _replaced,
        _at_the_end_of_a_link,
        lambda p: (p / "module.py").unlink(),
        lambda p: (p / "more.py").write_text("text"),
        lambda p: (p / "inner/more.py").write_text("text"),
        lambda p: (p / "new").mkdir(),
        lambda p: (p / "data/__init__.py").write_text("text"),  # it is a package from now on
    ],
)
def test_a_change_makes_it_be_computed(package: Path, change: Callable[[Path], object]) -> None:
    assert _kept(package) == "the key"
    time.sleep(0.02)  # until the clock of the files goes on
    change(package)
    assert _kept(package, "another") == "another"


def test_a_file_that_changes_after_it_was_noted(package: Path) -> None:
    key = _key(package)
    key.note()
    time.sleep(0.02)
    (package / "module.py").write_text("other")
    key.keep("of which contents?")
    assert _key(package).find() == ""


def test_a_file_that_has_just_changed_is_not_trusted(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may change again, at the same time of the clock."""
    monkeypatch.setattr(stored_keys, "_SETTLED_SECONDS", 10.0)
    assert _kept(package) == ""


def test_a_file_from_an_image_is_not_trusted(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another image may have another content with the same times."""
    monkeypatch.setattr(stored_keys, "_state", lambda path: [7, 4, 10**9, 2 * 10**9])
    assert _kept(package) == ""


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b'{"key": 1, "states": {}}', b'{"key": "a"}'])
def test_a_broken_file_is_replaced(package: Path, content: bytes) -> None:
    _kept(package)
    (path,) = package.parent.glob("cache/pygraph/key-*.json")
    path.write_bytes(content)
    assert _kept(package, "another") == "another"


def test_a_file_without_states_is_not_trusted(package: Path) -> None:
    _kept(package)
    (path,) = package.parent.glob("cache/pygraph/key-*.json")
    path.write_text(json.dumps({"key": "a", "states": {}}))
    assert _key(package).find() == ""


def test_a_folder_that_cannot_be_written(package: Path) -> None:
    (package.parent / "cache").write_text("a file")
    assert _kept(package) == ""


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What is to be kept."""
    entries: list[object] = []
    monkeypatch.setattr(stored_keys, "_to_keep", entries)
    return entries


def test_a_key_that_others_began_to_compute_is_not_kept(package: Path, noted: list[object]) -> None:
    """Its files may have changed since then."""
    stored_keys._install(_key(package), lambda: None, lambda key: None)
    answers = iter(["", None])  # they began a moment later
    stored_keys._install(_key(package), lambda: next(answers), lambda key: None)
    assert not noted


def test_a_key_that_is_never_computed_is_not_kept(package: Path, noted: list[object]) -> None:
    answers = iter(["", "", "", "the key"])
    stored_keys._install(_key(package), lambda: next(answers), lambda key: None)
    stored_keys.keep()
    assert len(noted) == 1 and _key(package).find() == ""
    stored_keys.keep()
    assert not noted and _key(package).find() == "the key"


def test_two_threads_keep_a_key(package: Path, noted: list[object]) -> None:
    def so_far() -> str:
        noted.clear()  # by the other thread
        return "the key"

    noted.append((_key(package), so_far))
    stored_keys.keep()
    assert not noted


@pytest.mark.parametrize("error", [RuntimeError("already set"), ValueError("not hexadecimal")])
def test_a_key_that_cannot_be_set(package: Path, noted: list[object], error: Exception) -> None:
    def use(key: str) -> None:
        raise error

    assert _kept(package) == "the key"
    stored_keys._install(_key(package), lambda: "", use)
    assert not noted


@known_here
def test_what_pytorch_knows_of_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    computing, end = threading.Event(), threading.Event()

    def compute() -> bytes:
        computing.set()
        assert end.wait(60)
        return b"key"

    for start in ("prefetch", "call"):
        key = codecache.torch_key_cache(compute)
        monkeypatch.setattr(codecache, "torch_key", key)
        assert stored_keys._torch_key_so_far() == ""
        thread = threading.Thread(target=key if start == "call" else key.prefetch)
        thread.start()
        assert computing.wait(60) and stored_keys._torch_key_so_far() is None
        end.set()
        thread.join()
        assert stored_keys._torch_key_so_far() == (b"key".hex() if start == "call" else None)
        assert key() == b"key" and stored_keys._torch_key_so_far() == b"key".hex()
        computing.clear(), end.clear()


def test_what_triton_knows_of_its_key() -> None:
    seen = []

    @functools.lru_cache
    def triton_key() -> str:
        seen.append(stored_keys._triton_key_so_far(triton_key))
        return "key"

    assert stored_keys._triton_key_so_far(triton_key) == ""
    assert triton_key() == "key" and seen == [None]
    assert stored_keys._triton_key_so_far(triton_key) == "key"


def test_a_known_key_is_computed_after_its_cache_is_cleared() -> None:
    original = functools.lru_cache(lambda: "computed")
    function = stored_keys._known_at_first(original, "stored")
    assert function() == "stored" and function.cache_info().currsize == 1
    function.cache_clear()
    assert function() == function() == "computed" and function.__wrapped__ is original


@known_here
def test_a_package_of_triton_that_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's key lacks its files, where it cannot be imported."""
    import triton

    assert len(list(hashed_files.of_triton())) > 20
    monkeypatch.delitem(sys.modules, f"{triton.__name__}.backends.nvidia")
    with pytest.raises(ImportError, match="has not been imported"):
        list(hashed_files.of_triton())


_READ = """
import sys
import torch
from torch._inductor import codecache
from pygraph.torch_patches import hashed_files
read = set()
is_on = True
sys.addaudithook(lambda event, args: read.add(args[0]) if event == "open" and is_on else None)
codecache.torch_key(), codecache.triton_key()
is_on = False
named = {*hashed_files.of_torch(), *hashed_files.of_triton()}
read = {name for name in read if isinstance(name, str) and not name.endswith(".pyc")}
print(len(read), sorted(read - named))
"""

_KEYS = """
import sys
from torch._inductor import codecache
from torch._inductor.runtime import triton_compat
from pygraph.torch_patches import stored_keys
computed = []
def build(*args, of=codecache.build_code_hash):
    computed.append(args[1])
    of(*args)
codecache.build_code_hash = build
triton_key = triton_compat.triton_key
stored_keys._SETTLED_SECONDS = -1.0
if sys.argv[1] == "first":
    codecache.torch_key()  # too early: its files may have changed since then
stored_keys.install()
print(codecache.torch_key().hex(), codecache.triton_key(), triton_compat.triton_key())
print(bool(computed), triton_key.cache_info().currsize)
stored_keys.keep()
"""

_PROGRAM = """
import pytest, torch
from torch._inductor import codecache
from pygraph.torch_patches import stored_keys
from tests.python import graphs_on_the_cpu
computed = []
def build(*args, of=codecache.build_code_hash):
    computed.append(args[1])
    of(*args)
build.__wrapped__ = codecache.build_code_hash  # whose source is known
build.__globals__["__name__"] = "pygraph.test"
codecache.build_code_hash = build
stored_keys._SETTLED_SECONDS = -1.0
graphs_on_the_cpu.install(pytest.MonkeyPatch())
with torch.no_grad():
    options = {{"pygraph.warm_start": True, **{}}}
    torch.compile(lambda x: x + 1, backend="pygraph", options=options)(torch.ones(2))
print(bool(computed))
"""


def _run(code: str, *arguments: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@known_here
def test_all_files_that_the_keys_are_computed_from_are_looked_at() -> None:
    count, missed = _run(_READ)[0].split(maxsplit=1)
    assert int(count) > 2000 and missed == "[]"


@known_here
def test_the_keys_of_pytorch_and_triton_are_computed_once(tmp_path: Path) -> None:
    folder = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    keys, how = _run(_KEYS, "first", **folder)
    assert how == "True 1"
    for expected in ("True 0", "False 0"):  # Triton's has been kept, PyTorch's has not
        assert _run(_KEYS, "later", **folder) == [keys, expected]
    off = _run(_KEYS, "later", TORCHINDUCTOR_FORCE_DISABLE_CACHES="1", **folder)
    assert off == [keys, "True 1"]


@known_here
def test_another_way_of_computing_them_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_keys, "_KNOWN", ())
    stored_keys.install.cache_clear()
    with pytest.raises(RuntimeError, match="in another way"):
        stored_keys.install()


@known_here
def test_a_later_process_of_a_warm_program_computes_none(tmp_path: Path) -> None:
    folder = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    ours = {"pygraph.patches": "warm_start,stored_keys"}
    assert [_run(_PROGRAM.format(ours), **folder) for _ in range(2)] == [["True"], ["False"]]
    theirs = {"pygraph.patches": "warm_start"}
    assert _run(_PROGRAM.format(theirs), **folder) == ["True"]
