"""Host memory that may be used for a while, by what the system's files say."""

from __future__ import annotations

import pathlib

import pytest

from pygraph.gpu.host_memory import has_room

GIB = 1 << 30


def _system(root: pathlib.Path, files: dict[str, str]) -> pathlib.Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


_MACHINE = {"proc/meminfo": f"MemTotal: 999 kB\nMemAvailable: {64 << 20} kB\nCached: 1 kB\n"}
_NO_LIMIT = {"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": f"{8 * GIB}\n"}
_LIMIT = {"sys/fs/cgroup/memory.max": f"{40 * GIB}", "sys/fs/cgroup/memory.current": f"{8 * GIB}"}
_OLD_LIMIT = {
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{16 * GIB}",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{12 * GIB}",
}


@pytest.mark.parametrize(
    ("files", "available"),
    [
        (_MACHINE, 64),
        (_MACHINE | _NO_LIMIT, 64),
        (_MACHINE | _LIMIT, 32),
        (_MACHINE | _OLD_LIMIT, 4),
        (_LIMIT, 32),
    ],
)
@pytest.mark.parametrize("ranks", [1, 8])
def test_a_part_of_what_is_left_may_be_used(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, str],
    available: int,
    ranks: int,
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    root = _system(tmp_path, files)
    most = available * GIB // 4 // ranks
    assert has_room(most, root)
    assert not has_room(most + 1, root)


def test_a_system_that_tells_nothing_has_room(tmp_path: pathlib.Path) -> None:
    assert has_room(GIB, tmp_path)


def test_a_container_over_its_limit_has_none(tmp_path: pathlib.Path) -> None:
    over = {"sys/fs/cgroup/memory.max": "10", "sys/fs/cgroup/memory.current": "11"}
    assert not has_room(0, _system(tmp_path, over))
