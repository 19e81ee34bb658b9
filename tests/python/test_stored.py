"""Files that processes share are whole, whoever writes them, and leave nothing behind."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pygraph import stored


def test_a_file_is_found_again_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "a.json"
    with pytest.raises(FileNotFoundError):
        stored.read(path)
    for data in ({"a": [1, 2]}, {"b": None}):
        stored.write(path, data)
        assert stored.read(path) == data
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    stored.write(tmp_path / "link" / "a.json", 1)
    assert stored.read(tmp_path / "real" / "a.json") == 1


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failure_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    path = tmp_path / "a.json"
    stored.write(path, "old")

    def fail(*args: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(type(error)):
            stored.write(path, "new")
    assert stored.read(path) == "old"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(TypeError):
        stored.write(path, object())
    assert stored.read(path) == "old"


def test_writers_with_the_same_number_do_not_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in two containers, and in two threads of one process."""
    path = tmp_path / "a.json"
    replace = os.replace

    def second_writer_first(source: Any, target: Any) -> None:
        monkeypatch.setattr(os, "replace", replace)
        assert json.loads(Path(source).read_text()) == "first"
        stored.write(path, "second")
        assert json.loads(Path(source).read_text()) == "first"
        replace(source, target)

    monkeypatch.setattr(os, "replace", second_writer_first)
    stored.write(path, "first")
    assert stored.read(path) == "first"
    assert list(tmp_path.iterdir()) == [path]
