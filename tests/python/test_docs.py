"""What the documentation says of the tests."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_footguns_name_tests_that_exist() -> None:
    text = (ROOT / "docs" / "footguns.md").read_text()
    pins = re.findall(r"\[([\w/]+\.py): `(test_\w+)`\]", text)
    assert len(pins) > 10
    for file, name in pins:
        path = ROOT / file if file.startswith("tests/") else ROOT / "tests" / "gpu" / file
        assert f"def {name}(" in path.read_text(), f"{file}: {name}"
