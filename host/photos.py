"""The photos of a subject: the pictures of a folder, checked and tied to their captions.

Reads the pictures of one folder and the captions beside them; subfolders are not searched. Writes nothing: the photos
stay as they are, byte for byte.
Command: `pocketdit doctor PHOTOS`.
"""

import hashlib
import logging
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from PIL import Image

from host.captions import (
    captioned_sentence,
    is_caption_file,
    read_caption,
    resolve_caption,
    stray_caption_files,
)
from host.decode import READ_FORMATS, WHITE, Color, Decoded, checked_color, decode, format_of, is_picture

logger = logging.getLogger(__name__)

CaptionSource = Literal["sidecar", "instance prompt", ""]
OnBad = Literal["skip", "fail"]

MAX_ASPECT = 16
JUNK_NAMES = ("thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r", "__macosx", "@eadir")


@dataclass(frozen=True, kw_only=True, slots=True)
class PhotoRow:
    """What was found about one visible file of the folder; `dataclasses.asdict` makes it JSON."""

    name: str
    """File name as on disk."""
    picture: bool
    """Whether it is, or was meant as, a picture; the rest is listed and left alone."""
    format: str
    """JPEG, PNG, WEBP, BMP, TIFF, GIF or HEIC; empty if it was not recognised."""
    orientation: int
    """EXIF orientation, 1 to 8; 1 is upright."""
    mode: str
    """Pillow's mode in the file, such as RGB, CMYK or I;16."""
    width: int
    """Pixels, of the upright picture."""
    height: int
    """Pixels, of the upright picture."""
    bytes: int
    """Size of the file."""
    sha256: str
    """Of the file; empty if it cannot be read."""
    caption: str
    """The words it trains with; empty if there are none."""
    caption_source: CaptionSource
    """Where the words come from; empty if there are none."""
    accepted: bool
    """Whether training uses it."""
    reason: str
    """Why it is not used, or a warning; empty if all is well."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Photo:
    """A photo ready for training. The hash, not the position in a list, ties samples and captions to it."""

    name: str
    """File name as on disk."""
    sha256: str
    """Of the file."""
    image: Image.Image
    """Upright, RGB, sRGB, at its own size."""
    caption: str
    """The words it trains with."""
    orientation: int
    """EXIF orientation that was undone, 1 to 8."""


def inspect_photos(photos_dir: Path, *, min_side: int, instance_prompt: str | None = None) -> list[PhotoRow]:
    """Decodes every picture of a folder and says what training would do with it.

    Args:
        photos_dir: Folder of the photos. Hidden files, system files and captions get no row, see `ignored_names`;
            subfolders and files that are no pictures get one that says so.
        min_side: Pixels; a photo whose shorter side is less gets a warning.
        instance_prompt: Words for photos without a caption; None if not decided yet.

    Returns:
        One row for each visible file, sorted by name.

    Raises:
        ValueError: If the folder does not exist, is a file or has no picture.
    """
    rows = [row for row, _ in _read_folder(photos_dir, min_side, instance_prompt, WHITE)]
    _require_picture(photos_dir, rows)
    return rows


def load_photos(
    photos_dir: Path,
    *,
    min_side: int,
    instance_prompt: str | None = None,
    background: Color = WHITE,
    on_bad: OnBad = "fail",
) -> list[Photo]:
    """Loads the photos of a folder, sorted by name.

    Args:
        photos_dir: Folder of the photos.
        min_side: Pixels; a photo whose shorter side is less is logged as a warning and kept.
        instance_prompt: Words for photos without a caption.
        background: Red, green, blue from 0 to 255 behind transparent pixels.
        on_bad: `fail` at pictures that cannot be used, all named together, or `skip` them with a warning.

    Returns:
        The photos, at least one.

    Raises:
        ValueError: If the folder has no usable picture, if a picture is bad and `on_bad` is `fail`, or if a photo has
            neither a caption nor an instance prompt.
    """
    if on_bad not in ("skip", "fail"):
        raise ValueError(f"policy for bad pictures: got {on_bad!r}, expected skip or fail; choose one of them")
    found = list(_read_folder(photos_dir, min_side, instance_prompt, checked_color(background)))
    rows = [row for row, _ in found]
    _require_picture(photos_dir, rows)
    bad = [row for row in rows if row.picture and not row.accepted]
    if bad and on_bad == "fail":
        raise ValueError(
            f"photos: got {len(bad)} that cannot be used in {photos_dir}, expected none: {_names_and_reasons(bad)}; "
            "mend or remove them, or choose to skip bad pictures"
        )
    photos: list[Photo] = []
    uncaptioned: list[str] = []
    for row, image in found:
        if row.reason:
            logger.warning("%s %s: %s", row.name, _status(row), row.reason)
        if not row.accepted:
            continue
        if not row.caption:
            uncaptioned.append(row.name)
            continue
        assert image is not None
        photos.append(
            Photo(name=row.name, sha256=row.sha256, image=image, caption=row.caption, orientation=row.orientation)
        )
    if uncaptioned:
        raise ValueError(
            f"captions: got none for {', '.join(uncaptioned)} and no instance prompt, expected one of them; "
            'write photo.txt beside photo.jpg or give an instance prompt such as "a photo of sks dog"'
        )
    if not photos:
        raise ValueError(
            f"photos: got no usable picture in {photos_dir}, expected at least one: {_names_and_reasons(bad)}; "
            "mend them or add others"
        )
    logger.info("%s", _summary(rows, 0))
    return photos


def ignored_names(photos_dir: Path) -> list[str]:
    """Names of what `inspect_photos` gives no row: hidden and system files, and captions that belong to a photo."""
    entries = _entries(photos_dir)
    strays = stray_caption_files(photos_dir, _pictures(entries))
    return [path.name for path in entries if _is_junk(path) or (_is_caption(path) and path not in strays)]


def doctor_table(rows: Sequence[PhotoRow], *, num_ignored: int = 0) -> str:
    """Lays the rows out as a text table that ends with "5 of 6 accepted, 3 of 5 captioned, 2 ignored".

    Args:
        rows: From `inspect_photos`.
        num_ignored: Files without a row, `len(ignored_names(photos_dir))`; rows of files that are no pictures are added.
    """
    cells = [("file", "format", "size", "exif", "mode", "caption", "status", "note")]
    for row in rows:
        seen = row.width > 0
        cells.append(
            (
                _printable(row.name),
                row.format or "-",
                f"{row.width}x{row.height}" if seen else "-",
                str(row.orientation) if seen else "-",
                row.mode or "-",
                row.caption_source or "-",
                _status(row),
                row.reason,
            )
        )
    widths = [max(_columns(line[index]) for line in cells) for index in range(len(cells[0]))]
    lines = [
        "  ".join(cell + " " * (width - _columns(cell)) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]
    return "\n".join([*lines, "", _summary(rows, num_ignored)])


def _status(row: PhotoRow) -> str:
    return "accepted" if row.accepted else "rejected" if row.picture else "ignored"


def _summary(rows: Sequence[PhotoRow], num_ignored: int) -> str:
    accepted = [row for row in rows if row.accepted]
    num_pictures = sum(row.picture for row in rows)
    captioned = captioned_sentence(sum(row.caption_source == "sidecar" for row in accepted), len(accepted))
    return f"{len(accepted)} of {num_pictures} accepted, {captioned}, {len(rows) - num_pictures + num_ignored} ignored"


def _entries(photos_dir: Path) -> list[Path]:
    """Everything in the folder, in an order that does not depend on how the file system spells accents."""
    if not photos_dir.is_dir():
        got = "a file" if photos_dir.exists() else "nothing there"
        raise ValueError(f"photos: got {got} at {photos_dir}, expected a folder of pictures; check the path")
    return sorted(photos_dir.iterdir(), key=lambda path: (unicodedata.normalize("NFC", path.name), path.name))


def _is_junk(path: Path) -> bool:
    return path.name.startswith(".") or path.name.lower() in JUNK_NAMES


def _is_caption(path: Path) -> bool:
    return is_caption_file(path) and not path.is_dir()


def _pictures(entries: Sequence[Path]) -> list[Path]:
    return [path for path in entries if not (_is_junk(path) or path.is_dir() or _is_caption(path)) and is_picture(path)]


def _require_picture(photos_dir: Path, rows: Sequence[PhotoRow]) -> None:
    if any(row.picture for row in rows):
        return
    folders = [row.name for row in rows if (photos_dir / row.name).is_dir()]
    hint = f"subfolders are not searched ({', '.join(folders)}): give the one with the photos" if folders else ""
    raise ValueError(
        f"photos: got no picture in {photos_dir}, expected at least one of {', '.join(READ_FORMATS)} or HEIC; "
        f"{hint or 'put 3 to 6 photos of the subject there'}"
    )


def _names_and_reasons(rows: Sequence[PhotoRow]) -> str:
    return "; ".join(f"{row.name}: {row.reason}" for row in rows)


def _read_folder(
    photos_dir: Path, min_side: int, instance_prompt: str | None, background: Color
) -> Iterator[tuple[PhotoRow, Image.Image | None]]:
    """Yields a row for each visible file, one decoded picture at a time, as a folder may hold more than fits in memory."""
    if min_side < 1:
        raise ValueError(f"smallest side: got {min_side} px, expected at least 1; give the side that training needs")
    entries = _entries(photos_dir)
    pictures = _pictures(entries)
    strays = stray_caption_files(photos_dir, pictures)
    first_with: dict[str, str] = {}
    for path in entries:
        if path in pictures:
            yield _read_picture(path, min_side, instance_prompt, background, first_with)
        elif not _is_junk(path) and (path in strays or not _is_caption(path)):
            reason = strays.get(path, "a folder, not searched" if path.is_dir() else "not a picture")
            yield _row(path, b"", picture=False, reason=reason), None


def _read_picture(
    path: Path, min_side: int, instance_prompt: str | None, background: Color, first_with: dict[str, str]
) -> tuple[PhotoRow, Image.Image | None]:
    """Reads one picture; `first_with` maps the hash of the pixels met so far to the file they were in."""
    try:
        data = path.read_bytes()
    except OSError as error:
        return _row(path, b"", reason=f"cannot be read ({error.strerror}): make the file readable or remove it"), None
    try:
        decoded = decode(path, data, background)
    except ValueError as error:
        return _row(path, data, reason=str(error)), None
    width, height = decoded.image.size
    notes = list(decoded.notes)
    accepted = max(width, height) <= MAX_ASPECT * min(width, height)
    if not accepted:
        notes.append(f"more than {MAX_ASPECT} times as long as wide: crop it")
    elif min(width, height) < min_side:
        notes.append(f"smaller than {min_side} px: will be upscaled")
    sidecar, has_words = None, bool((instance_prompt or "").strip())
    try:
        sidecar = read_caption(path)
        has_words = has_words or bool(sidecar)
        if not has_words:
            notes.append("no caption and no instance prompt")
    except ValueError as error:
        accepted, has_words = False, False
        notes.append(str(error))
    if accepted:
        # Equal pixels include equal files; a second one trains, but counts double.
        first = first_with.setdefault(_pixel_hash(decoded.image), path.name)
        if first != path.name:
            notes.append(f"same picture as {first}: remove one")
    row = _row(
        path,
        data,
        decoded=decoded,
        caption=resolve_caption(sidecar, instance_prompt) if has_words else "",
        caption_source="sidecar" if sidecar else "instance prompt" if has_words else "",
        accepted=accepted,
        reason="; ".join(notes),
    )
    return row, decoded.image if accepted else None


def _row(
    path: Path,
    data: bytes,
    *,
    reason: str,
    picture: bool = True,
    decoded: Decoded | None = None,
    caption: str = "",
    caption_source: CaptionSource = "",
    accepted: bool = False,
) -> PhotoRow:
    width, height = decoded.image.size if decoded else (0, 0)
    return PhotoRow(
        name=path.name,
        picture=picture,
        format=decoded.format if decoded else format_of(data),
        orientation=decoded.orientation if decoded else 1,
        mode=decoded.mode if decoded else "",
        width=width,
        height=height,
        bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest() if data else "",
        caption=caption,
        caption_source=caption_source,
        accepted=accepted,
        reason=reason,
    )


def _pixel_hash(image: Image.Image) -> str:
    return hashlib.sha256(repr(image.size).encode() + image.tobytes()).hexdigest()


def _columns(text: str) -> int:
    """Terminal columns of a text: accents take none, East Asian wide letters two."""
    return sum(
        0 if unicodedata.combining(letter) else 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        for letter in text
    )


def _printable(name: str) -> str:
    """A name on disk may hold bytes that are not UTF-8, which cannot be printed, and line breaks."""
    text = unicodedata.normalize("NFC", name).encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
