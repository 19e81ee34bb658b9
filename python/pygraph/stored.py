"""Small JSON files on disk, which processes share.

A file is written whole, under a name of its own, and renamed: a reader finds the old contents, the new
ones, or no file, however many processes and threads write at the same time.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path
from typing import Any


def read(path: Path) -> Any:
    """The contents of a file. Raises an exception if it does not exist or cannot be read."""
    return json.loads(path.read_text("utf-8"))


def write(path: Path, data: Any) -> None:
    """Writes a file, and its folder if there is none. If that fails, raises OSError and leaves nothing
    behind."""
    text = json.dumps(data)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Numbers of processes are not unique: containers and hosts may share the folder.
    temporary = path.with_suffix(f".{os.getpid()}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def has_time_of_change(ctime_ns: int) -> bool:
    """Whether this is the time at which a file, here, was last changed. File systems made from an image
    (SquashFS, EROFS, ext4 made from an archive) give the time that was written into the image, in which
    another content may have the same. They have whole seconds, other file systems parts of them."""
    return ctime_ns % 1_000_000_000 != 0
