"""The photos of a subject: found, checked, decoded, turned upright and made plain sRGB.

Reads the pictures of one folder and the captions beside them; subfolders are not searched. Writes nothing: the photos
stay as they are, byte for byte.
Command: `pocketdit doctor PHOTOS`.
"""

import hashlib
import io
import logging
import unicodedata
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import ExifTags, Image, ImageCms, ImageFile, features

from host.captions import (
    captioned_sentence,
    is_caption_file,
    read_caption,
    resolve_caption,
    stray_caption_files,
)

logger = logging.getLogger(__name__)

Color = tuple[int, int, int]
CaptionSource = Literal["sidecar", "instance prompt", ""]
OnBad = Literal["skip", "fail"]

WHITE: Color = (255, 255, 255)
MAX_ASPECT = 16
READ_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF")
READ_EXTENSIONS = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
HEIC_EXTENSIONS = (".heic", ".heif")
HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
# Raw files are TIFF inside, and the picture that Pillow finds in them is a thumbnail.
RAW_EXTENSIONS = (".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".raf", ".srw", ".pef")
OTHER_EXTENSIONS = (".avif", ".jxl", ".jp2", ".psd", ".svg", ".eps", ".tga", ".ico")
JUNK_NAMES = ("thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r", "__macosx", "@eadir")
HEIC_ADVICE = "HEIC needs pillow-heif: pip install pillow-heif, or convert to JPEG"
COPY_ADVICE = "copy the file again or remove it"

# What undoes each EXIF orientation.
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Decoded:
    image: Image.Image
    format: str
    orientation: int
    mode: str
    notes: list[str]


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
    found = list(_read_folder(photos_dir, min_side, instance_prompt, _checked_color(background)))
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


def to_rgb(image: Image.Image, background: Color = WHITE) -> Image.Image:
    """Makes any picture upright 8-bit sRGB without alpha.

    The EXIF orientation is undone, an embedded colour profile converted, 16-bit and float values scaled to 8 bits, and
    transparent pixels blended with the background, so that colours hidden under them do not show.

    Args:
        image: Picture in any mode of Pillow, still with its `info`.
        background: Red, green, blue from 0 to 255.

    Returns:
        A new RGB picture. Of an animation, the first frame.

    Raises:
        ValueError: If the background is not a colour, or the pixels are not finite.
    """
    converted, _, notes = _to_rgb(image, _checked_color(background))
    for note in notes:
        logger.warning("%s", note)
    return converted


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
    """What is, or was meant as, a picture: by extension, or by its first bytes as some apps save without one."""
    return [
        path for path in entries if not (_is_junk(path) or path.is_dir() or _is_caption(path)) and _is_picture(path)
    ]


def _is_picture(path: Path) -> bool:
    known = (*READ_EXTENSIONS, *HEIC_EXTENSIONS, *RAW_EXTENSIONS, *OTHER_EXTENSIONS)
    if path.suffix.lower() in known:
        return True
    try:
        with path.open("rb") as file:
            return bool(_format_of(file.read(16)))
    except OSError:
        return False


def _format_of(head: bytes) -> str:
    """Recognises a format by the first 12 bytes; BMP is left out, as two letters prove nothing."""
    if head[4:8] == b"ftyp" and head[8:12] in HEIC_BRANDS:
        return "HEIC"
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    signatures = {b"\xff\xd8\xff": "JPEG", b"\x89PNG": "PNG", b"II*\0": "TIFF", b"MM\0*": "TIFF", b"GIF8": "GIF"}
    return next((name for signature, name in signatures.items() if head.startswith(signature)), "")


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
        decoded = _decode(path, data, background)
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
    decoded: _Decoded | None = None,
    caption: str = "",
    caption_source: CaptionSource = "",
    accepted: bool = False,
) -> PhotoRow:
    width, height = decoded.image.size if decoded else (0, 0)
    return PhotoRow(
        name=path.name,
        picture=picture,
        format=decoded.format if decoded else _format_of(data),
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


def _decode(path: Path, data: bytes, background: Color) -> _Decoded:
    """Decodes every pixel, as the header of a truncated file looks fine; raises ValueError with a reason for the row."""
    suffix = path.suffix.lower()
    if not data:
        raise ValueError(f"empty file (0 bytes): {COPY_ADVICE}")
    if suffix in RAW_EXTENSIONS:
        raise ValueError("camera raw files are not read: export it as JPEG")
    formats = list(READ_FORMATS)
    if _format_of(data) == "HEIC":
        if not _register_heic():
            raise ValueError(HEIC_ADVICE)
        formats.append("HEIF")
    elif suffix in OTHER_EXTENSIONS and not _format_of(data):
        raise ValueError(f"{suffix[1:].upper()} is not read: convert it to JPEG or PNG")
    with _strict_decoding():
        try:
            image = Image.open(io.BytesIO(data), formats=formats)
            # Loading turns a TIFF upright and forgets that it did; pillow-heif does so with a HEIC and keeps a note.
            undone = _orientation(image)[0] if image.format == "TIFF" else image.info.get("original_orientation")
            image.load()
        except Image.DecompressionBombError as error:
            limit = 2 * (Image.MAX_IMAGE_PIXELS or 0) / 1e6
            raise ValueError(
                f"more than {limit:.0f} megapixels, too many to decode safely: save a smaller copy"
            ) from error
        except Image.UnidentifiedImageError as error:
            what = "truncated or damaged (no whole header)" if _format_of(data) else "no picture inside"
            raise ValueError(f"{what}: {COPY_ADVICE}") from error
        except Exception as error:  # the decoders raise a dozen types on damaged bytes
            raise ValueError(f"truncated or damaged ({error}): {COPY_ADVICE}") from error
        notes = ["animated or several pages: the first is used"] if _is_animated(image) else []
        try:
            rgb, orientation, more_notes = _to_rgb(image, background)
        except Exception as error:
            raise ValueError(f"cannot be made RGB ({error}): convert it to JPEG or PNG") from error
    names = {"MPO": "JPEG", "HEIF": "HEIC"}
    name = image.format or ""
    return _Decoded(
        image=rgb,
        format=names.get(name, name),
        orientation=undone or orientation,
        mode=image.mode,
        notes=notes + more_notes,
    )


@contextmanager
def _strict_decoding() -> Iterator[None]:
    """Refuses truncated files even if another library asked Pillow to accept them, and lets large photos pass quietly."""
    lenient = ImageFile.LOAD_TRUNCATED_IMAGES
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = lenient


def _register_heic() -> bool:
    try:
        import pillow_heif
    except ImportError:
        return False
    pillow_heif.register_heif_opener()
    return True


def _is_animated(image: Image.Image) -> bool:
    # In files of phones the further frames are previews, depth maps or the rest of a burst.
    return image.format not in ("MPO", "HEIF") and bool(getattr(image, "is_animated", False))


def _pixel_hash(image: Image.Image) -> str:
    return hashlib.sha256(repr(image.size).encode() + image.tobytes()).hexdigest()


def _orientation(image: Image.Image) -> tuple[int, list[str]]:
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception as error:  # damaged EXIF, which says nothing about the pixels
        return 1, [f"EXIF cannot be read ({error}): taken as upright"]
    return (orientation if orientation in range(1, 9) else 1), []


def _to_rgb(image: Image.Image, background: Color) -> tuple[Image.Image, int, list[str]]:
    """Also returns the EXIF orientation that was undone and what went wrong on the way."""
    image.load()
    orientation, notes = _orientation(image)
    icc = image.info.get("icc_profile")
    if orientation in UPRIGHT:
        image = image.transpose(UPRIGHT[orientation])
    if image.mode.startswith("I") or image.mode == "F":
        image = _to_8_bit(image)
    color, alpha = _split_alpha(image)
    rgb = _to_srgb(color, icc, notes)
    if alpha is not None:
        canvas = Image.new("RGB", rgb.size, background)
        canvas.paste(rgb, mask=alpha)
        rgb = canvas
    rgb.info = {}  # or a second call would turn the picture and convert its colours again
    return rgb, orientation, notes


def _to_8_bit(image: Image.Image) -> Image.Image:
    """Scales 16-bit, 32-bit and float greys to L, or to LA if a grey value stands for transparency.

    White is 65535 for 16 bits. 32-bit and float files do not say what white is: the smallest of the usual whites that
    covers the values is taken, and other ranges are stretched from their least to their greatest value.
    """
    values = np.asarray(image).astype(np.float64)
    if not np.isfinite(values).all():
        raise ValueError("pixels: got NaN or infinity, expected finite values")
    low, high = min(0.0, values.min()), values.max()
    if image.mode.startswith("I;16"):
        white = 65535.0
    else:
        usual = (1.0, 255.0, 65535.0) if image.mode == "F" else (255.0, 65535.0)
        white = next((white for white in usual if low == 0 and high <= white), high)
    scaled = (values - low) / max(white - low, 1e-300) * 255
    grey = Image.fromarray(np.rint(scaled).astype(np.uint8))
    key = image.info.get("transparency")
    if not isinstance(key, int):
        return grey
    return Image.merge("LA", (grey, Image.fromarray(np.where(values == key, 0, 255).astype(np.uint8))))


def _split_alpha(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    if image.mode == "La":
        image = image.convert("LA")
    if not image.has_transparency_data:
        return image, None
    rgba = image.convert("RGBA")
    color = image.convert("L") if image.mode in ("1", "L", "LA") else rgba.convert("RGB")
    return color, rgba.getchannel("A")


def _to_srgb(color: Image.Image, icc: bytes | None, notes: list[str]) -> Image.Image:
    """Converts the colours of a picture without alpha by its profile; without one they count as sRGB already."""
    mode = color.mode
    if mode not in ("L", "RGB", "CMYK"):
        color = color.convert("L" if mode == "1" else "RGB")
    if not icc or mode == "LAB":
        return color.convert("RGB")
    if not features.check("littlecms2"):
        notes.append("colour profile not used: this build of Pillow has no LittleCMS")
        return color.convert("RGB")
    try:
        profile = ImageCms.ImageCmsProfile(io.BytesIO(icc))
        space = profile.profile.xcolor_space.strip()
        if space == "RGB" and color.mode == "L":
            color = color.convert("RGB")
        if {"GRAY": "L"}.get(space, space) != color.mode:
            notes.append(f"colour profile not used: it is for {space}, the picture is {mode}")
            return color.convert("RGB")
        converted = ImageCms.profileToProfile(
            color,
            profile,
            ImageCms.createProfile("sRGB"),
            renderingIntent=ImageCms.Intent.RELATIVE_COLORIMETRIC,
            outputMode="RGB",
            flags=ImageCms.Flags.BLACKPOINTCOMPENSATION,
        )
    except (OSError, ImageCms.PyCMSError) as error:
        notes.append(f"colour profile not used: it cannot be read ({error})")
        return color.convert("RGB")
    assert converted is not None
    return converted


def _checked_color(background: Color) -> Color:
    if len(background) != 3 or not all(isinstance(value, int) and 0 <= value <= 255 for value in background):
        raise ValueError(
            f"background: got {background!r}, expected red, green, blue from 0 to 255; (255, 255, 255) is white"
        )
    return background


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
