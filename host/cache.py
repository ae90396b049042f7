"""Caches the stages of an export under keys that hold everything a stage depends on. Writes `~/.cache/pocketdit`.

A key is the hash of content, model, cut, crop, dtype and schema: change one and the stage is made again; a stage made
with another model is never taken for this one.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runtime import atomic
from runtime.bundle import sha256_file

MARKER = "complete.json"


def cache_dir() -> Path:
    """Where stages are kept: $POCKETDIT_CACHE, else the user's cache folder."""
    root = os.environ.get("POCKETDIT_CACHE")
    return Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pocketdit"


def stage_key(parts: Mapping[str, Any]) -> str:
    """A hash over `parts` (JSON values)."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def stage_folder(stage: str, parts: Mapping[str, Any]) -> Path:
    """Where the result of a stage (e.g. `samples`) with this key is kept."""
    return cache_dir() / stage / stage_key(parts)


def cached_stage(stage: str, parts: Mapping[str, Any], build: Callable[[Path], None]) -> tuple[Path, bool]:
    """Returns the folder of a stage, making it if this key is new.

    Args:
        stage: e.g. `weights`.
        parts: Everything the result depends on.
        build: Fills a folder; when it returns, the folder is kept, and when it raises, nothing is.

    Returns:
        The folder, and whether it was there already. A folder whose files were altered since is made again.
    """
    folder = stage_folder(stage, parts)
    if is_whole(folder):
        return folder, True
    with new_stage(folder) as temp:
        build(temp)
    return folder, False


@contextmanager
def new_stage(folder: Path) -> Iterator[Path]:
    """Yields a temp folder beside `folder`; when the block ends without an error it takes `folder`'s place."""
    temp = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}.partial")
    temp.mkdir(parents=True)
    try:
        yield temp
        hashes = {str(path.relative_to(temp)): sha256_file(path) for path in sorted(temp.rglob("*")) if path.is_file()}
        atomic.write_json(temp / MARKER, hashes)
        shutil.rmtree(folder, ignore_errors=True)
        temp.rename(folder)
    except BaseException:
        shutil.rmtree(temp, ignore_errors=True)
        raise


def is_whole(folder: Path) -> bool:
    """Whether a stage is there and every file is as it was written."""
    try:
        files = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        return all(sha256_file(folder / name) == digest for name, digest in files.items())
    except (OSError, ValueError, KeyError):
        return False
