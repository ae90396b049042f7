"""The words that go with each photo: a text file beside it, or the instance prompt.

Reads `photo.txt` or `photo.caption` beside `photo.jpg`. Writes nothing.
Command: `pocketdit doctor PHOTOS` prints which caption each photo gets.
"""

import unicodedata
from collections.abc import Sequence
from pathlib import Path

CAPTION_EXTENSIONS = (".txt", ".caption")
LIKELY_CAPTION_EXTENSIONS = (
    ".captions",
    ".cap",
    ".text",
    ".tags",
    ".tag",
    ".md",
    ".json",
    ".csv",
    ".rtf",
    ".doc",
    ".docx",
)


def is_caption_file(path: Path) -> bool:
    """Whether the name ends like a caption's, in any case."""
    return path.suffix.lower() in CAPTION_EXTENSIONS


def caption_path(photo_path: Path) -> Path | None:
    """Finds the caption file of a photo.

    The name before the extension must be the photo's. Composed and decomposed accents are the same (a Mac writes the
    second), and so are upper and lower case, unless the other spelling belongs to another file.

    Args:
        photo_path: The photo; its folder must exist.

    Returns:
        The path of the caption file, or None if there is none.

    Raises:
        ValueError: If two caption files claim the photo.
    """
    stem = _composed(photo_path.stem)
    files = sorted(path for path in photo_path.parent.iterdir() if not path.is_dir())
    captions = [path for path in files if is_caption_file(path)]
    found = [path for path in captions if _composed(path.stem) == stem]
    if not found:
        taken = {_composed(path.stem) for path in files if not is_caption_file(path)}
        found = [
            path
            for path in captions
            if _composed(path.stem).casefold() == stem.casefold() and _composed(path.stem) not in taken
        ]
    if len(found) > 1:
        raise ValueError(
            f"captions of {photo_path.name}: got {', '.join(path.name for path in found)}, expected one file; "
            "keep one and remove the others"
        )
    return found[0] if found else None


def read_caption(photo_path: Path) -> str | None:
    """Reads the caption beside a photo as one line.

    Args:
        photo_path: The photo; its folder must exist.

    Returns:
        The text, trimmed, line breaks and runs of blanks as single blanks; None without a file or with an empty one.

    Raises:
        ValueError: If the file is not UTF-8 text, cannot be read, or is not the only one.
    """
    path = caption_path(photo_path)
    if path is None:
        return None
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"caption {path.name}: cannot be read ({error.strerror}); make the file readable") from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"caption {path.name}: got bytes that are not UTF-8 (at byte {error.start}), expected UTF-8 text; "
            "save the file again as UTF-8"
        ) from error
    if "\0" in text:
        raise ValueError(
            f"caption {path.name}: got zero bytes, as in UTF-16, expected UTF-8 text; save the file again as UTF-8"
        )
    return _one_line(text) or None


def resolve_caption(sidecar: str | None, instance_prompt: str | None) -> str:
    """Chooses the words for a photo: its own caption, else the instance prompt.

    Args:
        sidecar: What `read_caption` returned.
        instance_prompt: The prompt for photos without a caption, such as "a photo of sks dog".

    Raises:
        ValueError: If there is neither.
    """
    caption = _one_line(sidecar or "") or _one_line(instance_prompt or "")
    if not caption:
        raise ValueError(
            "caption: got neither a caption file nor an instance prompt, expected one of them; "
            'write photo.txt beside photo.jpg or give an instance prompt such as "a photo of sks dog"'
        )
    return caption


def captioned_sentence(num_captioned: int, num_photos: int) -> str:
    """The preflight sentence, such as "3 of 5 captioned"; photos that use the instance prompt do not count."""
    return f"{num_captioned} of {num_photos} captioned"


def stray_caption_files(photos_dir: Path, photo_paths: Sequence[Path]) -> dict[Path, str]:
    """Finds text files that were probably meant as captions but are not read.

    Args:
        photos_dir: Folder of the photos.
        photo_paths: The photos in it.

    Returns:
        For each such file, sorted by path, what is wrong with it and what to do.
    """
    caption_of = {photo: _caption_path_or_none(photo) for photo in photo_paths}
    used = set(caption_of.values())
    captioned = {photo.stem for photo, path in caption_of.items() if path}
    claimed = {_composed(photo.stem).casefold() for photo in photo_paths}
    stem_of = {_composed(name).casefold(): photo.stem for photo in photo_paths for name in (photo.stem, photo.name)}
    strays: dict[Path, str] = {}
    for path in sorted(photos_dir.iterdir()):
        if path.name.startswith(".") or path.is_dir() or path in used or path in photo_paths:
            continue
        stem = _composed(path.stem).casefold()
        # Also `photo.jpg.txt` and `photo.txt.txt`, which Windows makes when it hides extensions.
        owner = stem_of.get(stem) or stem_of.get(_composed(Path(path.stem).stem).casefold())
        if is_caption_file(path) and stem in claimed:
            continue  # one of two captions of a photo: `read_caption` refuses them by name
        if owner in captioned and not is_caption_file(path):
            continue  # notes or metadata of a photo that has its caption
        if owner and (is_caption_file(path) or path.suffix.lower() in (*LIKELY_CAPTION_EXTENSIONS, "")):
            strays[path] = f"not read: a caption of this photo must be named {owner}.txt; rename it"
        elif is_caption_file(path):
            strays[path] = "not read: no photo has this name; rename it like its photo or remove it"
    return strays


def _caption_path_or_none(photo_path: Path) -> Path | None:
    try:
        return caption_path(photo_path)
    except ValueError:
        return None


def _composed(name: str) -> str:
    return unicodedata.normalize("NFC", name)


def _one_line(text: str) -> str:
    return unicodedata.normalize("NFC", " ".join(text.split()))
