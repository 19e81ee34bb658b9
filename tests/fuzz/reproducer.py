"""A failing program as a test file of its own."""

from __future__ import annotations

import pprint
from collections.abc import Sequence
from pathlib import Path

from .program import Program, function_source, partition_source, to_json

_TEMPLATE = '''"""Seed {seed}: {verdict}. Written by tests/fuzz; run it from the repository's root.

{detail}
"""

from tests.fuzz.check import check
from tests.fuzz.program import from_json

# The source that runs:
#
{source}
PROGRAM = {program}


def test_seed_{seed}() -> None:
    outcome = check(from_json(PROGRAM), "{device}")
    assert outcome.verdict in ("equal", "by chance", "raises"), outcome
    assert not outcome.leaked, outcome
'''


def write(folder: Path, program: Program, device: str, verdict: str, detail: Sequence[str]) -> Path:
    """The file's path."""
    source = partition_source(program) if program.level == "partition" else function_source(program)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"test_seed_{program.seed}.py"
    path.write_text(
        _TEMPLATE.format(
            seed=program.seed,
            verdict=verdict,
            detail="\n".join(detail).replace("\\", "/").replace('"""', "'''"),
            source="\n".join(f"#     {line}".rstrip() for line in source.splitlines()),
            program=pprint.pformat(to_json(program), width=100, sort_dicts=False),
            device=device,
        )
    )
    return path
