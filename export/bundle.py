"""Puts a bundle together from its parts and moves it into place when it is whole. Writes the folder that goes to the phone."""

import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from runtime.bundle import sha256_file
from runtime.manifest import FILE_NAME, BundleManifest, FileSpec, write_manifest

T = TypeVar("T")


def assemble_bundle(
    bundle_dir: Path, parts: Mapping[str, Path], manifest: BundleManifest, check: Callable[[Path], T]
) -> tuple[BundleManifest, T]:
    """Writes a bundle beside `bundle_dir` and renames it there.

    Args:
        bundle_dir: Target; an older bundle in its place is replaced once the new one is whole.
        parts: Name in the bundle to source file.
        manifest: Its `files` are filled in here.
        check: Called with the finished folder before it is moved; when it raises, nothing is left.

    Returns:
        The manifest as written, and what `check` returned.

    Raises:
        ValueError: `bundle_dir` holds something that is not a bundle.
    """
    require_replaceable(bundle_dir)
    temp = bundle_dir.with_name(f".{bundle_dir.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        for name, source in parts.items():
            (temp / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, temp / name)
            with (temp / name).open("rb") as file:
                os.fsync(file.fileno())
        files = {name: FileSpec(bytes=(temp / name).stat().st_size, sha256=sha256_file(temp / name)) for name in parts}
        manifest = replace(manifest, files=files)
        write_manifest(temp, manifest)
        checked = check(temp)
        if bundle_dir.exists():
            old = temp.with_suffix(".old")
            bundle_dir.rename(old)
            temp.rename(bundle_dir)
            shutil.rmtree(old)
        else:
            temp.rename(bundle_dir)
    except BaseException:
        shutil.rmtree(temp, ignore_errors=True)
        raise
    return manifest, checked


def require_replaceable(bundle_dir: Path) -> None:
    """Refuses a target folder that is neither missing, empty, nor a bundle.

    Raises:
        ValueError: Says what is there.
    """
    if bundle_dir.is_dir() and any(bundle_dir.iterdir()) and not (bundle_dir / FILE_NAME).is_file():
        raise ValueError(f"{bundle_dir} is not empty and not a bundle; nothing was written. Choose another folder.")
    if bundle_dir.is_file():
        raise ValueError(f"{bundle_dir} is a file; give a folder for the bundle.")
