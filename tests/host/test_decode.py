"""Decoding: every kind of file a phone or a scanner makes becomes the picture its owner sees, or is named."""

import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose
from PIL import Image, ImageCms, ImageFile

from host.decode import to_rgb
from host.photos import load_photos
from tests.pictures import ORIENTATIONS, PROMPT, encoded, exif_with, pixels, reopened, row_of, scene, stored_as


@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize(
    ("kind", "options", "atol"),
    [
        ("PNG", {}, 0),
        ("WEBP", {"lossless": True}, 0),
        ("TIFF", {}, 0),
        ("TIFF", {"compression": "tiff_lzw"}, 0),
        ("JPEG", {"quality": 100, "subsampling": 0}, 6),
    ],
)
def test_every_orientation_gives_the_upright_picture(
    tmp_path: Path, orientation: int, kind: str, options: dict, atol: int
) -> None:
    (tmp_path / "photo").write_bytes(
        encoded(stored_as(scene(), orientation), kind, exif=exif_with(orientation), **options)
    )
    [photo] = load_photos(tmp_path, min_side=8, instance_prompt=PROMPT)
    assert photo.orientation == orientation
    assert photo.image.size == (48, 32)
    assert_allclose(pixels(photo.image), pixels(scene()), atol=atol)
    row = row_of(tmp_path, "photo")
    assert (row.orientation, row.width, row.height, row.format) == (orientation, 48, 32, kind)


@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "I;16", "1"])
def test_orientation_and_mode_are_independent(orientation: int, mode: str) -> None:
    source = (
        Image.fromarray(pixels(scene())[..., 0].astype(np.uint16) * 257) if mode == "I;16" else scene().convert(mode)
    )
    kind = "TIFF" if mode == "CMYK" else "PNG"
    turned = reopened(stored_as(source, orientation), kind, exif=exif_with(orientation))
    assert_allclose(pixels(to_rgb(turned)), pixels(to_rgb(source)))


def test_a_converted_picture_is_not_turned_again() -> None:
    once = to_rgb(reopened(stored_as(scene(), 6), "JPEG", exif=exif_with(6), icc_profile=srgb_profile()))
    assert to_rgb(once).tobytes() == once.tobytes()
    assert not once.info


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_orientations_that_do_not_exist_count_as_upright(tmp_path: Path, orientation: int) -> None:
    (tmp_path / "a.png").write_bytes(encoded(scene(), "PNG", exif=exif_with(orientation)))
    row = row_of(tmp_path, "a.png")
    assert (row.orientation, row.width, row.accepted) == (1, 48, True)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("exif", [b"XX*\0garbage", b"II*\0", b"II*\0\x08\0\0\0\x01\0\x12\x01\x02\0\x04\0\0\0AB\0\0"])
def test_damaged_exif_does_not_cost_the_photo(tmp_path: Path, kind: str, exif: bytes) -> None:
    (tmp_path / "photo").write_bytes(encoded(scene(), kind, exif=b"Exif\0\0" + exif))
    row = row_of(tmp_path, "photo")
    assert (row.accepted, row.orientation, row.width) == (True, 1, 48)
    # Pillow itself passes over damaged EXIF in a JPEG; the last case is sound EXIF whose orientation is a text.
    noticed = kind != "JPEG" and len(exif) < 20
    assert row.reason.startswith("EXIF cannot be read") == noticed


@pytest.mark.parametrize("background", [(255, 255, 255), (0, 0, 0), (12, 200, 99)])
@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "RGBa", "La", "P"])
def test_colours_hidden_under_alpha_do_not_show(mode: str, background: tuple[int, int, int]) -> None:
    """Left opaque, right transparent, with a loud colour everywhere."""
    secret = Image.new("RGBA", (8, 4), (250, 40, 3, 255))
    secret.paste((250, 40, 3, 0), (4, 0, 8, 4))
    if mode == "P":
        image = Image.new("P", (8, 4), 1)
        image.putpalette([1, 2, 3, 250, 40, 3, 250, 40, 3])
        image.paste(2, (4, 0, 8, 4))
        image.info["transparency"] = b"\xff\xff\x00"
    elif mode == "PA":
        image = secret.convert("P").convert("PA")
        image.putalpha(secret.getchannel("A"))
    elif mode == "La":
        image = secret.convert("LA").convert("La")
    else:
        image = secret.convert(mode)
    assert image.mode == mode
    result = to_rgb(image, background)
    assert_allclose(pixels(result)[:, 4:], np.broadcast_to(background, (4, 4, 3)))
    grey = secret.convert("L").getpixel((0, 0))
    assert_allclose(pixels(result)[0, 0], [grey] * 3 if mode in ("LA", "La") else (250, 40, 3), atol=1)


def test_half_transparent_pixels_are_blended() -> None:
    assert to_rgb(Image.new("RGBA", (1, 1), (200, 100, 0, 51)), (0, 0, 100)).getpixel((0, 0)) == (40, 20, 80)


@pytest.mark.parametrize(("mode", "color", "key"), [("L", 9, 9), ("RGB", (9, 8, 7), (9, 8, 7)), ("1", 0, 0)])
def test_a_colour_that_stands_for_transparency_becomes_the_background(mode: str, color: Any, key: Any) -> None:
    image = reopened(Image.new(mode, (2, 2), color), "PNG", transparency=key)
    assert to_rgb(image, (1, 2, 3)).getpixel((0, 0)) == (1, 2, 3)


def test_a_16_bit_grey_that_stands_for_transparency_becomes_the_background() -> None:
    image = reopened(Image.fromarray(np.array([[300, 65535]], np.uint16)), "PNG")
    image.load()
    image.info["transparency"] = 300
    assert [to_rgb(image, (1, 2, 3)).getpixel((x, 0)) for x in (0, 1)] == [(1, 2, 3), (255, 255, 255)]


@pytest.mark.parametrize("mode", ["L", "P", "1", "RGB", "RGBX", "CMYK", "YCbCr", "HSV"])
def test_opaque_modes_keep_their_colours(mode: str) -> None:
    source = Image.new("RGB", (4, 4), (255, 0, 0) if mode not in ("L", "1") else (255, 255, 255))
    image = source.convert(mode)
    assert image.mode == mode
    result = to_rgb(image)
    assert result.mode == "RGB"
    assert_allclose(pixels(result), pixels(source), atol=2)


def test_lab_keeps_its_colours() -> None:
    transform = ImageCms.buildTransform(ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), "RGB", "LAB")
    lab = ImageCms.applyTransform(Image.new("RGB", (2, 2), (200, 60, 20)), transform)
    assert lab is not None
    assert lab.mode == "LAB"
    assert_allclose(to_rgb(lab).getpixel((0, 0)), (200, 60, 20), atol=3)


def test_adobe_cmyk_jpeg_is_not_inverted(tmp_path: Path) -> None:
    """Pillow writes the Adobe marker, so the file holds inverted values; white paper must stay white."""
    white_and_red = Image.new("CMYK", (32, 16), (0, 0, 0, 0))
    white_and_red.paste((0, 255, 255, 0), (16, 0, 32, 16))
    data = encoded(white_and_red, "JPEG", quality=100)
    assert b"Adobe" in data
    (tmp_path / "a.jpg").write_bytes(data)
    [photo] = load_photos(tmp_path, min_side=8, instance_prompt=PROMPT)
    assert_allclose(photo.image.getpixel((4, 4)), (255, 255, 255), atol=3)
    assert_allclose(photo.image.getpixel((28, 4)), (255, 0, 0), atol=3)
    assert row_of(tmp_path, "a.jpg").mode == "CMYK"


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        (mode, kind)
        for mode in ("I;16", "I;16B", "I")
        for kind in ("PNG", "TIFF", "memory")
        if (mode, kind) != ("I", "PNG")
    ],
)
def test_16_bit_greys_are_scaled_not_clipped(mode: str, kind: str) -> None:
    values = np.array([[0, 300, 1000, 12_850, 40_000, 65_535]])
    image = Image.fromarray(values.astype({"I;16": "<u2", "I;16B": ">u2", "I": "<i4"}[mode]))
    assert image.mode == mode
    if kind != "memory":
        image = reopened(image, kind)
    assert list(pixels(to_rgb(image))[0, :, 0]) == [0, 1, 4, 50, 156, 255]  # divided by 257


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 0.5, 1.0], [0, 128, 255]),
        ([0.0, 0.2, 0.4], [0, 51, 102]),
        ([0.0, 100.0, 255.0], [0, 100, 255]),
        ([0.0, 32896.0, 65535.0], [0, 128, 255]),
        ([-1.0, 0.0, 1.0], [0, 128, 255]),
        ([0.0, 5e5, 1e6], [0, 128, 255]),
        ([0.0, 0.0, 0.0], [0, 0, 0]),
    ],
)
def test_float_greys_are_scaled(values: list[float], expected: list[int]) -> None:
    image = reopened(Image.fromarray(np.array([values], np.float32)), "TIFF")
    assert image.mode == "F"
    assert list(pixels(to_rgb(image))[0, :, 1]) == expected


def test_a_float_picture_with_nan_is_rejected_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.tif").write_bytes(encoded(Image.fromarray(np.full((9, 9), np.nan, np.float32)), "TIFF"))
    with pytest.raises(ValueError, match=r"a\.tif: cannot be made RGB .*NaN"):
        load_photos(tmp_path, min_side=8, instance_prompt=PROMPT)


def srgb_profile() -> bytes:
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def swapped_profile() -> bytes:
    """sRGB with the red and the blue primary exchanged: converting by it exchanges red and blue."""
    data = bytearray(srgb_profile())
    num_tags = struct.unpack(">I", data[128:132])[0]
    tags = {bytes(data[at : at + 4]): at for at in range(132, 132 + 12 * num_tags, 12)}
    red, blue = tags[b"rXYZ"] + 4, tags[b"bXYZ"] + 4
    data[red : red + 8], data[blue : blue + 8] = data[blue : blue + 8], data[red : red + 8]
    return bytes(data)


@pytest.mark.parametrize(
    ("kind", "mode"), [("PNG", "RGB"), ("PNG", "RGBA"), ("TIFF", "RGB"), ("JPEG", "RGB"), ("PNG", "P")]
)
def test_an_embedded_profile_is_converted_to_srgb(kind: str, mode: str) -> None:
    image = Image.new("RGB", (16, 16), (204, 0, 102)).convert(mode)
    result = to_rgb(reopened(image, kind, icc_profile=swapped_profile()))
    assert_allclose(result.getpixel((8, 8)), (102, 0, 204), atol=4)


@pytest.mark.parametrize("mode", ["L", "LA", "1"])
def test_a_grey_picture_takes_an_rgb_profile(tmp_path: Path, mode: str) -> None:
    grey = scene().convert(mode)
    (tmp_path / "a.png").write_bytes(encoded(grey, "PNG", icc_profile=srgb_profile()))
    [photo] = load_photos(tmp_path, min_side=8, instance_prompt=PROMPT)
    assert_allclose(pixels(photo.image), pixels(grey.convert("RGB")), atol=1)
    assert row_of(tmp_path, "a.png").reason == ""


def test_an_srgb_profile_changes_nothing() -> None:
    result = to_rgb(reopened(scene(), "PNG", icc_profile=srgb_profile()))
    assert_allclose(pixels(result), pixels(scene()), atol=1)


@pytest.mark.parametrize("profile", [b"garbage", srgb_profile()[:200]])
def test_a_profile_that_cannot_be_used_is_reported(tmp_path: Path, profile: bytes) -> None:
    (tmp_path / "a.png").write_bytes(encoded(scene(), "PNG", icc_profile=profile))
    row = row_of(tmp_path, "a.png")
    assert row.accepted
    assert row.reason.startswith("colour profile not used: it cannot be read")


def test_a_profile_for_other_colours_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.tif").write_bytes(encoded(scene().convert("CMYK"), "TIFF", icc_profile=srgb_profile()))
    assert row_of(tmp_path, "a.tif").reason == "colour profile not used: it is for RGB, the picture is CMYK"


@pytest.mark.parametrize(
    ("kind", "extension"),
    [("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp"), ("BMP", "bmp"), ("TIFF", "tif"), ("GIF", "gif")],
)
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.97])
def test_truncated_pictures_are_named_whatever_the_format(
    tmp_path: Path, kind: str, extension: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)  # as other libraries leave it
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    data = encoded(noise, kind)
    (tmp_path / f"bad.{extension}").write_bytes(data[: int(len(data) * share)])
    (tmp_path / "good.jpg").write_bytes(encoded(scene(), "JPEG"))
    row = row_of(tmp_path, f"bad.{extension}")
    assert not row.accepted
    # A BMP is not recognised by two letters, so nothing shows that there was a picture.
    assert row.reason.startswith(("truncated or damaged", "empty file" if share == 0 else "no picture inside"))
    with pytest.raises(ValueError, match=rf"got 1 that cannot be used .* bad\.{extension}: "):
        load_photos(tmp_path, min_side=8, instance_prompt=PROMPT)
    photos = load_photos(tmp_path, min_side=8, instance_prompt=PROMPT, on_bad="skip")
    assert [photo.name for photo in photos] == ["good.jpg"]
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True


def test_a_flipped_bit_in_a_png_is_noticed(tmp_path: Path) -> None:
    data = bytearray(encoded(scene(), "PNG"))
    data[len(data) // 2] ^= 1
    (tmp_path / "a.png").write_bytes(data)
    assert "truncated or damaged" in row_of(tmp_path, "a.png").reason


def test_content_counts_and_not_the_extension(tmp_path: Path) -> None:
    (tmp_path / "really_png.jpg").write_bytes(encoded(scene(), "PNG"))
    (tmp_path / "web_page.jpg").write_bytes(b"<html>404</html>")
    assert row_of(tmp_path, "really_png.jpg").format == "PNG"
    assert row_of(tmp_path, "web_page.jpg").reason == "no picture inside: copy the file again or remove it"


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.dng", encoded(scene(), "TIFF"), "camera raw files are not read: export it as JPEG"),
        ("a.avif", b"\0\0\0\x20ftypavif" + bytes(99), "AVIF is not read: convert it to JPEG or PNG"),
        (
            "a.HEIC",
            b"\0\0\0\x20ftypheic" + bytes(99),
            "HEIC needs pillow-heif: pip install pillow-heif, or convert to JPEG",
        ),
        (
            "a.jpg",
            b"\0\0\0\x20ftypmif1" + bytes(99),
            "HEIC needs pillow-heif: pip install pillow-heif, or convert to JPEG",
        ),
    ],
)
def test_unread_formats_say_what_to_do(
    tmp_path: Path, name: str, data: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)  # as if it were not installed
    (tmp_path / name).write_bytes(data)
    row = row_of(tmp_path, name)
    assert (row.picture, row.accepted, row.reason) == (True, False, reason)


def test_of_an_animation_the_first_frame_is_taken(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (16, 16), color) for color in ((255, 0, 0), (0, 0, 255))]
    for kind, name in (("GIF", "a.gif"), ("WEBP", "b.webp"), ("TIFF", "c.tif"), ("PNG", "d.png")):
        options = {"lossless": True} if kind == "WEBP" else {}
        (tmp_path / name).write_bytes(encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options))
    for photo in load_photos(tmp_path, min_side=8, instance_prompt=PROMPT):
        assert photo.image.getpixel((3, 3)) == (255, 0, 0)
        assert row_of(tmp_path, photo.name).reason.startswith("animated or several pages: the first is used")


def test_a_phone_jpeg_with_a_second_picture_inside_is_a_plain_jpeg(tmp_path: Path) -> None:
    data = encoded(scene(), "MPO", save_all=True, append_images=[scene()])
    (tmp_path / "a.jpg").write_bytes(data)
    row = row_of(tmp_path, "a.jpg")
    assert (row.format, row.accepted, row.reason) == ("JPEG", True, "")


def test_decompression_bombs_are_a_row_and_large_photos_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
    (tmp_path / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunk + b"\0\0\0\0IDAT" + bytes(100))
    assert row_of(tmp_path, "bomb.png").reason == (
        "more than 179 megapixels, too many to decode safely: save a smaller copy"
    )
    monkeypatch.setattr(
        Image, "MAX_IMAGE_PIXELS", 48 * 32 * 2 // 3
    )  # Pillow warns of the scene, and does not refuse it
    (tmp_path / "large.png").write_bytes(encoded(scene(), "PNG"))
    assert row_of(tmp_path, "large.png").accepted


@pytest.mark.parametrize("background", [(0, 0), (0, 0, 256), (0.5, 0, 0)])
def test_a_background_that_is_no_colour_is_named(background: Any) -> None:
    with pytest.raises(ValueError, match="background: got"):
        to_rgb(scene(), background)
