"""Photos: what a folder holds is used, or named with what to do; captions reach the photo they belong to."""

import hashlib
import json
import logging
import unicodedata
from dataclasses import asdict
from pathlib import Path

import pytest
from PIL import Image

from host.photos import doctor_table, ignored_names, inspect_photos, load_photos
from tests.pictures import ORIENTATIONS, PROMPT, encoded, exif_with, row_of, scene, stored_as


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


def test_a_smallest_side_below_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="smallest side: got 0 px"):
        inspect_photos(tmp_path, min_side=0)
