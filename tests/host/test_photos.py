"""Photos: every kind of file a phone or a scanner makes becomes the picture its owner sees, or is named."""

import hashlib
import io
import json
import logging
import struct
import sys
import unicodedata
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose
from PIL import ExifTags, Image, ImageCms, ImageFile

from host.photos import (
    UPRIGHT,
    PhotoRow,
    doctor_table,
    ignored_names,
    inspect_photos,
    load_photos,
    to_rgb,
)

PROMPT = "a photo of sks dog"
ORIENTATIONS = range(1, 9)
# How a camera stores the upright picture for each orientation: the inverse of what undoes it.
STORED = {
    **UPRIGHT,
    6: Image.Transpose.ROTATE_90,
    8: Image.Transpose.ROTATE_270,
}


def scene(width: int = 48, height: int = 32) -> Image.Image:
    """A smooth picture without any symmetry."""
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    return Image.fromarray((np.stack([x, y, (1 - x) * y * y], -1) * 255).round().astype(np.uint8))


def stored_as(image: Image.Image, orientation: int) -> Image.Image:
    return image.transpose(STORED[orientation]) if orientation in STORED else image


def exif_with(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return exif


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def reopened(image: Image.Image, kind: str, **options: Any) -> Image.Image:
    return Image.open(io.BytesIO(encoded(image, kind, **options)))


def row_of(photos_dir: Path, name: str, **options: Any) -> PhotoRow:
    rows = inspect_photos(photos_dir, **{"min_side": 8, "instance_prompt": PROMPT, **options})
    return next(row for row in rows if row.name == name)


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image).astype(int)


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


def test_skipping_names_each_bad_photo_and_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a.jpg", "b.jpg"):
        (tmp_path / name).write_bytes(encoded(scene(), "JPEG")[:300])
    (tmp_path / "c.jpg").write_bytes(encoded(scene(), "JPEG"))
    with caplog.at_level(logging.INFO):
        load_photos(tmp_path, min_side=8, instance_prompt=PROMPT, on_bad="skip")
    text = caplog.text
    assert "a.jpg rejected: truncated" in text
    assert "b.jpg rejected: truncated" in text
    assert "1 of 3 accepted, 0 of 1 captioned, 0 ignored" in text
    (tmp_path / "c.jpg").unlink()
    with pytest.raises(ValueError, match="got no usable picture"):
        load_photos(tmp_path, min_side=8, instance_prompt=PROMPT, on_bad="skip")
    with pytest.raises(ValueError, match=r"got 2 that cannot be used.*a\.jpg: .*b\.jpg: "):
        load_photos(tmp_path, min_side=8, instance_prompt=PROMPT)
    with pytest.raises(ValueError, match="policy for bad pictures: got 'ignore'"):
        load_photos(tmp_path, min_side=8, instance_prompt=PROMPT, on_bad="ignore")  # type: ignore[arg-type]


def test_system_and_hidden_files_are_ignored(tmp_path: Path) -> None:
    picture = encoded(scene(), "JPEG")
    junk = ["._photo.jpeg", ".DS_Store", "Thumbs.db", "desktop.ini", ".hidden.png", "ehthumbs.db"]
    for name in [*junk, "photo.jpeg"]:
        (tmp_path / name).write_bytes(picture)
    (tmp_path / "photo.txt").write_text("a dog")
    (tmp_path / "__MACOSX").mkdir()
    rows = inspect_photos(tmp_path, min_side=8)
    assert [row.name for row in rows] == ["photo.jpeg"]
    assert sorted(ignored_names(tmp_path)) == sorted([*junk, "photo.txt", "__MACOSX"])


@pytest.mark.parametrize(
    "name", ["IMG.JPG", "img.Jpeg", "PHOTO.PNG", "scan.TIF", "x.jfif", "no_extension", "a.b.c.jpg"]
)
def test_pictures_are_found_by_any_spelling_and_by_content(tmp_path: Path, name: str) -> None:
    kind = {"PNG": "PNG", "TIF": "TIFF"}.get(name[-3:], "JPEG")
    (tmp_path / name).write_bytes(encoded(scene(), kind))
    row = row_of(tmp_path, name)
    assert (row.accepted, row.format, row.reason) == (True, kind, "")


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


def test_names_in_any_script_and_composition(tmp_path: Path) -> None:
    names = [unicodedata.normalize("NFD", "Köter é.jpg"), "子犬.JPG", "сόбака 🐕.png"]
    for number, name in enumerate(names):
        kind = "PNG" if name.endswith("png") else "JPEG"
        (tmp_path / name).write_bytes(encoded(scene(48 + number), kind))
    (tmp_path / (unicodedata.normalize("NFC", "Köter é") + ".txt")).write_text("ein Köter", encoding="utf-8")
    photos = load_photos(tmp_path, min_side=8, instance_prompt=PROMPT)
    assert {photo.name for photo in photos} == set(names)
    assert {photo.name: photo.caption for photo in photos}[names[0]] == "ein Köter"
    table = doctor_table(inspect_photos(tmp_path, min_side=8)).encode("utf-8").decode()
    assert "子犬.JPG" in table


def test_a_name_with_broken_bytes_or_line_breaks_can_be_printed(tmp_path: Path) -> None:
    try:
        (tmp_path / "a\udcff\n.png").write_bytes(encoded(scene(), "PNG"))
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    rows = inspect_photos(tmp_path, min_side=8)
    table = doctor_table(rows)
    assert table.encode("utf-8")
    assert len(table.splitlines()) == 4
    assert json.loads(json.dumps([asdict(row) for row in rows]))


def test_captions_reach_the_photo_they_belong_to(tmp_path: Path) -> None:
    for number, name in enumerate(["b.jpg", "a.JPG", "c.png"]):
        kind = "PNG" if name.endswith("png") else "JPEG"
        (tmp_path / name).write_bytes(encoded(scene(48 + number), kind))
    (tmp_path / "a.txt").write_text("the first")
    (tmp_path / "b.caption").write_text("the second")
    photos = load_photos(tmp_path, min_side=8, instance_prompt=PROMPT)
    assert [(photo.name, photo.caption) for photo in photos] == [
        ("a.JPG", "the first"),
        ("b.jpg", "the second"),
        ("c.png", PROMPT),
    ]
    for photo in photos:
        assert photo.sha256 == hashlib.sha256((tmp_path / photo.name).read_bytes()).hexdigest()
    assert [row.caption_source for row in inspect_photos(tmp_path, min_side=8, instance_prompt=PROMPT)] == [
        "sidecar",
        "sidecar",
        "instance prompt",
    ]
    with pytest.raises(ValueError, match=r"captions: got none for c\.png and no instance prompt"):
        load_photos(tmp_path, min_side=8)


def test_captions_that_would_be_lost_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.jpg").write_bytes(encoded(scene(), "JPEG"))
    (tmp_path / "a.captions").write_text("wrong extension")
    (tmp_path / "z.txt").write_text("no photo")
    load_photos(tmp_path, min_side=8, instance_prompt=PROMPT)
    assert "a.captions ignored: not read: a caption of this photo must be named a.txt" in caplog.text
    assert "z.txt ignored: not read: no photo has this name" in caplog.text
    assert ignored_names(tmp_path) == []
    assert "1 of 1 accepted, 0 of 1 captioned, 2 ignored" in doctor_table(inspect_photos(tmp_path, min_side=8))


def test_a_caption_that_is_not_utf8_rejects_its_photo(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(encoded(scene(), "JPEG"))
    (tmp_path / "a.txt").write_bytes("Köter".encode("latin-1"))
    row = row_of(tmp_path, "a.jpg")
    assert not row.accepted
    assert "caption a.txt: got bytes that are not UTF-8" in row.reason
    with pytest.raises(ValueError, match=r"a\.jpg: caption a\.txt"):
        load_photos(tmp_path, min_side=8, instance_prompt=PROMPT)


def test_small_and_double_photos_are_kept_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.png").write_bytes(encoded(scene(600, 511), "PNG"))
    (tmp_path / "b.png").write_bytes(encoded(scene(600, 512), "PNG"))
    (tmp_path / "c.png").write_bytes(encoded(scene(600, 512), "PNG"))
    (tmp_path / "d.png").write_bytes(encoded(stored_as(scene(600, 512), 6), "PNG", exif=exif_with(6)))
    rows = inspect_photos(tmp_path, min_side=512, instance_prompt=PROMPT)
    assert [row.reason for row in rows] == [
        "smaller than 512 px: will be upscaled",
        "",
        "same picture as b.png: remove one",
        "same picture as b.png: remove one",
    ]
    assert len(load_photos(tmp_path, min_side=512, instance_prompt=PROMPT)) == 4
    assert "a.png accepted: smaller than 512 px: will be upscaled" in caplog.text


def test_a_strip_is_rejected_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(Image.new("RGB", (161, 10)), "PNG"))
    (tmp_path / "b.png").write_bytes(encoded(Image.new("RGB", (160, 10)), "PNG"))
    rows = inspect_photos(tmp_path, min_side=8, instance_prompt=PROMPT)
    assert [row.accepted for row in rows] == [False, True]
    assert rows[0].reason == "more than 16 times as long as wide: crop it"


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


def test_folders_that_cannot_be_photos_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "outer" / "dog").mkdir(parents=True)
    (tmp_path / "outer" / "dog" / "a.jpg").write_bytes(encoded(scene(), "JPEG"))
    for name, match in [
        ("missing", "got nothing there at .*missing, expected a folder"),
        ("file", "got a file at .*file, expected a folder"),
        ("empty", "got no picture in .*empty, expected at least one of JPEG, .* put 3 to 6 photos"),
        ("outer", r"got no picture in .*outer.* subfolders are not searched \(dog\)"),
    ]:
        with pytest.raises(ValueError, match=match):
            inspect_photos(tmp_path / name, min_side=8)
        with pytest.raises(ValueError, match=match):
            load_photos(tmp_path / name, min_side=8, instance_prompt=PROMPT)


def test_other_files_and_subfolders_are_listed_and_do_not_fail(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(encoded(scene(), "JPEG"))
    (tmp_path / "clip.mov").write_bytes(b"\0\0\0\x14ftypqt  ")
    (tmp_path / "more").mkdir()
    (tmp_path / "gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
    assert {
        row.name: (row.picture, row.reason) for row in inspect_photos(tmp_path, min_side=8, instance_prompt="x")
    } == {
        "a.jpg": (True, ""),
        "clip.mov": (False, "not a picture"),
        "gone.jpg": (True, "cannot be read (No such file or directory): make the file readable or remove it"),
        "more": (False, "a folder, not searched"),
    }
    assert len(load_photos(tmp_path, min_side=8, instance_prompt=PROMPT, on_bad="skip")) == 1


def test_sources_are_left_as_they_are_and_results_repeat(tmp_path: Path) -> None:
    for orientation in ORIENTATIONS:
        (tmp_path / f"{orientation}.jpg").write_bytes(
            encoded(stored_as(scene(), orientation), "JPEG", exif=exif_with(orientation))
        )
    (tmp_path / "1.txt").write_text("a dog")
    (tmp_path / "bad.png").write_bytes(encoded(scene(), "PNG")[:100])

    def state() -> dict[str, tuple[bytes, int, int]]:
        return {
            path.name: (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino) for path in tmp_path.iterdir()
        }

    before = state()
    rows = [inspect_photos(tmp_path, min_side=512, instance_prompt=PROMPT) for _ in range(2)]
    photos = [load_photos(tmp_path, min_side=512, instance_prompt=PROMPT, on_bad="skip") for _ in range(2)]
    assert state() == before
    assert rows[0] == rows[1]
    first, second = ([(photo.name, photo.caption, photo.image.tobytes()) for photo in run] for run in photos)
    assert first == second
    assert [name for name, _, _ in first] == sorted(name for name, _, _ in first)


def test_doctor_table_lines_up_and_counts(tmp_path: Path) -> None:
    for number, name in enumerate(["a.jpg", "a_long_name.jpg", "c.jpg"]):
        (tmp_path / name).write_bytes(encoded(scene(48 + number), "JPEG"))
    (tmp_path / "c.jpg").write_bytes(b"x")
    (tmp_path / "a.txt").write_text("a dog")
    (tmp_path / "notes.pdf").write_bytes(b"%PDF")
    rows = inspect_photos(tmp_path, min_side=8, instance_prompt=PROMPT)
    lines = doctor_table(rows, num_ignored=len(ignored_names(tmp_path))).splitlines()
    assert lines[-1] == "2 of 3 accepted, 1 of 2 captioned, 2 ignored"
    start = lines[0].index("status")
    assert [line[start:].split()[0] for line in lines[1:-2]] == ["accepted", "accepted", "rejected", "ignored"]
    assert json.loads(json.dumps(asdict(rows[0])))["caption"] == "a dog"


@pytest.mark.parametrize("background", [(0, 0), (0, 0, 256), (0.5, 0, 0)])
def test_a_background_that_is_no_colour_is_named(background: Any) -> None:
    with pytest.raises(ValueError, match="background: got"):
        to_rgb(scene(), background)


def test_a_smallest_side_below_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="smallest side: got 0 px"):
        inspect_photos(tmp_path, min_side=0)
