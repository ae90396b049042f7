"""Atomic writes: temp file beside the target, fsync, rename, fsync of the folder. Killed at any moment, either the old
file or the new one is there, never half of one.
"""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runtime.errors import StorageFullError

TEMP_SUFFIX = ".partial"


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yields a temp path beside `path`; when the block ends without an error it is synced and becomes `path`.

    Raises:
        StorageFullError: There is no space for it; `path` is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_name(f"{path.name}.{os.getpid()}{TEMP_SUFFIX}")
    try:
        with storage_full(path):
            yield temp
            fsync(temp)
            os.replace(temp, path)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise
    fsync(path.parent)


@contextmanager
def storage_full(path: Path) -> Iterator[None]:
    """Turns the system's `no space left` into an error that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise StorageFullError(
            f"{path} was not written: the storage is full. What was saved before is untouched; free space and give the same "
            "command again, it goes on from there."
        ) from error


def write_bytes(path: Path, data: bytes) -> None:
    """Writes `data` to `path` atomically."""
    with atomic_path(path) as temp:
        temp.write_bytes(data)


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as indented UTF-8 JSON atomically; NaN is refused because JSON has none."""
    write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def fsync(path: Path) -> None:
    """Forces a file's or a folder's content to storage."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
