"""One picture file: its bytes become an upright, plain sRGB picture, or a reason why not.

Reads the bytes of a file. Writes nothing.
Command: `pocketdit doctor PHOTOS` prints what became of each file.
"""

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageCms, ImageFile, features

logger = logging.getLogger(__name__)

Color = tuple[int, int, int]

WHITE: Color = (255, 255, 255)
READ_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF")
READ_EXTENSIONS = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
HEIC_EXTENSIONS = (".heic", ".heif")
HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
# Raw files are TIFF inside, and the picture that Pillow finds in them is a thumbnail.
RAW_EXTENSIONS = (".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".raf", ".srw", ".pef")
OTHER_EXTENSIONS = (".avif", ".jxl", ".jp2", ".psd", ".svg", ".eps", ".tga", ".ico")
PICTURE_EXTENSIONS = (*READ_EXTENSIONS, *HEIC_EXTENSIONS, *RAW_EXTENSIONS, *OTHER_EXTENSIONS)
SIGNATURES = {b"\xff\xd8\xff": "JPEG", b"\x89PNG": "PNG", b"II*\0": "TIFF", b"MM\0*": "TIFF", b"GIF8": "GIF"}
# How Pillow names what a phone writes.
PHONE_FORMATS = {"MPO": "JPEG", "HEIF": "HEIC"}
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
class Decoded:
    """A picture and what its file said about it."""

    image: Image.Image
    """Upright, RGB, sRGB, at its own size."""
    format: str
    """JPEG, PNG, WEBP, BMP, TIFF, GIF or HEIC."""
    orientation: int
    """EXIF orientation that was undone, 1 to 8."""
    mode: str
    """Pillow's mode in the file, such as RGB, CMYK or I;16."""
    notes: list[str]
    """What went wrong without costing the picture."""


def is_picture(path: Path) -> bool:
    """Whether a file is, or was meant as, a picture: by extension, or by its first bytes as some apps save without one."""
    if path.suffix.lower() in PICTURE_EXTENSIONS:
        return True
    try:
        with path.open("rb") as file:
            return bool(format_of(file.read(16)))
    except OSError:
        return False


def format_of(head: bytes) -> str:
    """Recognises a format by the first 12 bytes; empty if unknown. BMP is left out, as two letters prove nothing."""
    if head[4:8] == b"ftyp" and head[8:12] in HEIC_BRANDS:
        return "HEIC"
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    return next((name for signature, name in SIGNATURES.items() if head.startswith(signature)), "")


def checked_color(background: Color) -> Color:
    """Returns the colour, red, green, blue from 0 to 255; raises ValueError if it is none."""
    if len(background) != 3 or not all(isinstance(value, int) and 0 <= value <= 255 for value in background):
        raise ValueError(
            f"background: got {background!r}, expected red, green, blue from 0 to 255; (255, 255, 255) is white"
        )
    return background


def decode(path: Path, data: bytes, background: Color = WHITE) -> Decoded:
    """Decodes every pixel, as the header of a truncated file looks fine.

    Args:
        path: Only its extension is used, for the formats that their bytes do not tell.
        data: All bytes of the file.
        background: Red, green, blue from 0 to 255 behind transparent pixels; see `checked_color`.

    Returns:
        The picture; of an animation, the first frame.

    Raises:
        ValueError: With the reason and what to do, as `PhotoRow.reason` has it.
    """
    formats = _readable_formats(path.suffix.lower(), data)
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
            what = "truncated or damaged (no whole header)" if format_of(data) else "no picture inside"
            raise ValueError(f"{what}: {COPY_ADVICE}") from error
        except Exception as error:  # the decoders raise a dozen types on damaged bytes
            raise ValueError(f"truncated or damaged ({error}): {COPY_ADVICE}") from error
        notes = ["animated or several pages: the first is used"] if _is_animated(image) else []
        try:
            rgb, orientation, more_notes = _to_rgb(image, background)
        except Exception as error:
            raise ValueError(f"cannot be made RGB ({error}): convert it to JPEG or PNG") from error
    name = image.format or ""
    return Decoded(
        image=rgb,
        format=PHONE_FORMATS.get(name, name),
        orientation=undone or orientation,
        mode=image.mode,
        notes=notes + more_notes,
    )


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
    converted, _, notes = _to_rgb(image, checked_color(background))
    for note in notes:
        logger.warning("%s", note)
    return converted


def _readable_formats(suffix: str, data: bytes) -> list[str]:
    """Pillow's names of the formats to try; raises ValueError for a file that is not worth trying."""
    if not data:
        raise ValueError(f"empty file (0 bytes): {COPY_ADVICE}")
    if suffix in RAW_EXTENSIONS:
        raise ValueError("camera raw files are not read: export it as JPEG")
    known = format_of(data)
    if suffix in OTHER_EXTENSIONS and not known:
        raise ValueError(f"{suffix[1:].upper()} is not read: convert it to JPEG or PNG")
    if known != "HEIC":
        return list(READ_FORMATS)
    if not _register_heic():
        raise ValueError(HEIC_ADVICE)
    return [*READ_FORMATS, "HEIF"]


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


def _to_rgb(image: Image.Image, background: Color) -> tuple[Image.Image, int, list[str]]:
    """Also returns the EXIF orientation that was undone and what went wrong on the way."""
    image.load()
    orientation, exif_note = _orientation(image)
    icc = image.info.get("icc_profile")
    if orientation in UPRIGHT:
        image = image.transpose(UPRIGHT[orientation])
    if image.mode.startswith("I") or image.mode == "F":
        image = _to_8_bit(image)
    color, alpha = _split_alpha(image)
    rgb, color_note = _to_srgb(color, icc)
    if alpha is not None:
        canvas = Image.new("RGB", rgb.size, background)
        canvas.paste(rgb, mask=alpha)
        rgb = canvas
    rgb.info = {}  # or a second call would turn the picture and convert its colours again
    return rgb, orientation, [note for note in (exif_note, color_note) if note]


def _orientation(image: Image.Image) -> tuple[int, str]:
    """Also returns why it cannot be read; empty if it can."""
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception as error:  # damaged EXIF, which says nothing about the pixels
        return 1, f"EXIF cannot be read ({error}): taken as upright"
    return (orientation if orientation in range(1, 9) else 1), ""


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


def _to_srgb(color: Image.Image, icc: bytes | None) -> tuple[Image.Image, str]:
    """Converts the colours of a picture without alpha by its profile; without one they count as sRGB already.

    Also returns why the profile was not used; empty if it was, or if there is none.
    """
    mode = color.mode
    if mode not in ("L", "RGB", "CMYK"):
        color = color.convert("L" if mode == "1" else "RGB")
    if not icc or mode == "LAB":
        return color.convert("RGB"), ""
    if not features.check("littlecms2"):
        return color.convert("RGB"), "colour profile not used: this build of Pillow has no LittleCMS"
    try:
        profile = ImageCms.ImageCmsProfile(io.BytesIO(icc))
        space = profile.profile.xcolor_space.strip()
        if space == "RGB" and color.mode == "L":
            color = color.convert("RGB")
        if {"GRAY": "L"}.get(space, space) != color.mode:
            return color.convert("RGB"), f"colour profile not used: it is for {space}, the picture is {mode}"
        converted = ImageCms.profileToProfile(
            color,
            profile,
            ImageCms.createProfile("sRGB"),
            renderingIntent=ImageCms.Intent.RELATIVE_COLORIMETRIC,
            outputMode="RGB",
            flags=ImageCms.Flags.BLACKPOINTCOMPENSATION,
        )
    except (OSError, ImageCms.PyCMSError) as error:
        return color.convert("RGB"), f"colour profile not used: it cannot be read ({error})"
    assert converted is not None
    return converted, ""
