"""Caches the stages of an export under keys that hold everything a stage depends on. Writes `~/.cache/pocketdit`.

A key is the hash of content, model, cut, crop, dtype and schema: change one and the stage is made again; a stage made
with another model is never taken for this one.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
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


def cached_stage(stage: str, parts: Mapping[str, Any], build: Callable[[Path], None]) -> tuple[Path, bool]:
    """Returns the folder of a stage, making it if this key is new.

    Args:
        stage: e.g. `samples`.
        parts: Everything the result depends on.
        build: Fills a folder; when it returns, the folder is kept, and when it raises, nothing is.

    Returns:
        The folder, and whether it was there already. A folder whose files were altered since is made again.
    """
    folder = cache_dir() / stage / stage_key(parts)
    if _is_whole(folder):
        return folder, True
    shutil.rmtree(folder, ignore_errors=True)
    temp = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}.partial")
    temp.mkdir(parents=True)
    try:
        build(temp)
        hashes = {str(path.relative_to(temp)): sha256_file(path) for path in sorted(temp.rglob("*")) if path.is_file()}
        atomic.write_json(temp / MARKER, {"parts": dict(parts), "files": hashes})
        temp.rename(folder)
    except BaseException:
        shutil.rmtree(temp, ignore_errors=True)
        raise
    return folder, False


def _is_whole(folder: Path) -> bool:
    try:
        files = json.loads((folder / MARKER).read_text(encoding="utf-8"))["files"]
        return all(sha256_file(folder / name) == digest for name, digest in files.items())
    except (OSError, ValueError, KeyError):
        return False
