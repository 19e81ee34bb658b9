"""A stored digest is the one that would be computed, whatever is on disk, and nothing here raises."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch._inductor import config

from pygraph import source_digest, stored
from pygraph.torch_patches import sources, stored_digests
from pygraph.torch_patches.stored_digests import StoredDigests
from pygraph.torch_patches.table import PATCHES, REQUIRED

_TEXT = "def function(a):\n    return a + 1\n\n\ndef other(a):\n    return a + 2\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    stored_digests._file.cache_clear()
    return tmp_path


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What digests were computed of."""
    seen: list[Any] = []
    original = source_digest.digest_of

    def digest_of(functions: tuple[Callable[..., Any], ...]) -> str:
        seen.extend(functions)
        return original(functions)

    monkeypatch.setattr(source_digest, "digest_of", digest_of)
    return seen


def _module(folder: Path, text: str = _TEXT) -> Any:
    path = folder / "module.py"
    path.write_text(text)
    stored_digests._file.cache_clear()
    spec = importlib.util.spec_from_file_location("module", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    return module


def _asked_for(*functions: Any) -> list[str]:
    """By another process."""
    digests = StoredDigests("of a test")
    found = [digests.digest_of(function) for function in functions]
    digests.save()
    return found


def _live(*functions: Any) -> list[str]:
    return [source_digest.digest_of((function,)) for function in functions]


def _files(folder: Path) -> list[Path]:
    return list((folder / "cache").rglob("digests-*.json"))


def test_the_second_process_computes_nothing(folder: Path, computed: list[Any]) -> None:
    module = _module(folder)
    names = (module.function, module.other)
    expected = _live(*names)
    computed.clear()
    assert _asked_for(*names) == expected and len(computed) == 2
    assert _asked_for(*names) == expected and len(computed) == 2
    assert len(_files(folder)) == 1


def test_one_digest_of_several_functions(folder: Path, computed: list[Any]) -> None:
    module = _module(folder)
    both = (module.function, module.other)
    expected = source_digest.digest_of(both)
    computed.clear()
    for _ in range(2):
        digests = StoredDigests("of a test")
        assert digests.digest_of(*both) == expected
        digests.save()
    assert computed == list(both)
    assert StoredDigests("of a test").digest_of(module.other, module.function) != expected
    assert StoredDigests("of a test").digest_of(module.function, len) == ""


def test_a_file_from_an_image_is_read_in_each_process(
    folder: Path, computed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another image may have another content with the same times."""
    assert stored.has_time_of_change(1_700_000_000_123_456_789)
    assert not stored.has_time_of_change(1_700_000_000_000_000_000)
    module = _module(folder)
    monkeypatch.setattr(stored, "has_time_of_change", lambda ctime_ns: False)
    for count in (1, 2):
        assert _asked_for(module.function) == _live(module.function)
        assert len(computed) == 2 * count and not _files(folder)


def test_a_changed_file_is_read_again(folder: Path) -> None:
    before = _asked_for(_module(folder).function)
    changed = _module(folder, _TEXT.replace("a + 1", "a - 1"))  # as long as before
    path = folder / "module.py"
    os.utime(path, ns=(path.stat().st_atime_ns, 1))
    stored_digests._file.cache_clear()
    assert _asked_for(changed.function) == _live(changed.function) != before


def test_another_function_in_its_place_is_another(folder: Path) -> None:
    module = _module(folder)
    _asked_for(module.function, module.other)
    module.other.__qualname__ = module.function.__qualname__
    assert _asked_for(module.other) == _live(module.other)


def test_a_function_that_others_have_wrapped_has_none(folder: Path) -> None:
    module = _module(folder)
    _asked_for(module.function)
    wrapper: Any = functools.wraps(module.function)(lambda a: module.function(a))
    assert _asked_for(wrapper, module.function) == ["", *_live(module.function)]


def test_what_has_no_source_has_none(folder: Path) -> None:
    assert _asked_for(len, functools.partial(len), eval("lambda: 0"), 3) == ["", "", "", ""]


def test_a_function_that_is_its_own_wrapper_has_none(folder: Path) -> None:
    function = _module(folder).function
    function.__wrapped__ = function
    assert _asked_for(function) == [""]


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"\xff", b'{"a": 1}', b'{"a": "no digest"}', b'{"a": null}']
)
def test_a_broken_file_is_replaced(folder: Path, content: bytes, computed: list[Any]) -> None:
    module = _module(folder)
    expected = _asked_for(module.function)
    (path,) = _files(folder)
    path.write_bytes(content)
    computed.clear()
    assert _asked_for(module.function) == expected and len(computed) == 1
    assert _asked_for(module.function) == expected and len(computed) == 1


def test_a_folder_that_cannot_be_written(folder: Path) -> None:
    (folder / "cache").write_text("a file")
    module = _module(folder)
    assert _asked_for(module.function) == _live(module.function)


def test_the_folder_of_the_caches_is_still_to_be_chosen(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyGraph is imported before a program is compiled, and does not choose for it."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    default = folder / "default"
    monkeypatch.setattr(stored_digests, "default_cache_dir", lambda: str(default))
    module = _module(folder)
    assert _asked_for(module.function) == _live(module.function)
    assert len(list(default.rglob("digests-*.json"))) == 1
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_disabled_caches(folder: Path, computed: list[Any]) -> None:
    module = _module(folder)
    with config.patch(force_disable_caches=True):
        _asked_for(module.function)
        _asked_for(module.function)
    assert len(computed) == 2 and not _files(folder)


def test_digests_of_a_patch_on_demand_are_stored_too(computed: list[Any]) -> None:
    patch = next(patch for patch in (*PATCHES, *REQUIRED) if patch.scope == "on demand")
    sources.differences(patch, sources.release())
    assert computed
    computed.clear()
    sources.differences(patch, sources.release())  # as in another process
    assert not computed
