"""Which files are the program's own, and which an installed package's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pygraph.callables.host import user_code
from pygraph.callables.host.user_code import is_library_file


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    def forget() -> None:
        user_code._libraries.cache_clear()
        user_code._folders_of_packages.cache_clear()
        is_library_file.cache_clear()

    forget()
    yield
    forget()


def test_pythons_library_and_installed_packages_are_libraries() -> None:
    for module in (torch, torch.optim, pytest):
        assert is_library_file(str(module.__file__))
    assert is_library_file("<frozen importlib._bootstrap>")
    assert not is_library_file(__file__)


def test_packages_of_a_target_folder_are_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `pip install --target` puts them, which does not name the folder site-packages."""
    (tmp_path / "installed" / "package-1.0.dist-info").mkdir(parents=True)
    (tmp_path / "own").mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "installed"), str(tmp_path / "own")])
    assert is_library_file(str(tmp_path / "installed" / "package" / "code.py"))
    assert not is_library_file(str(tmp_path / "own" / "code.py"))


def test_pytorch_is_a_library_wherever_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with PyTorch that is used from its sources, beside which the program may lie."""
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    assert is_library_file(str(tmp_path / "torch" / "nn" / "functional.py"))
    assert not is_library_file(str(tmp_path / "train.py"))
