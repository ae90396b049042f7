"""Captions: which text belongs to which photo, and what is said when one would be lost."""

import unicodedata
from pathlib import Path

import pytest

from host.captions import captioned_sentence, read_caption, resolve_caption, stray_caption_files


def make(folder: Path, **files: bytes) -> None:
    for name, data in files.items():
        (folder / name).write_bytes(data)


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "photo.jpg"
    path.write_bytes(b"")
    return path


@pytest.mark.parametrize(
    "name", ["photo.txt", "photo.caption", "photo.TXT", "photo.Caption", "PHOTO.txt", "Photo.CAPTION"]
)
def test_sidecar_is_found_in_any_case(photo: Path, name: str) -> None:
    (photo.parent / name).write_text("a dog")
    assert read_caption(photo) == "a dog"


def test_no_sidecar_means_no_caption(photo: Path) -> None:
    (photo.parent / "photo2.txt").write_text("another")
    assert read_caption(photo) is None


@pytest.mark.parametrize(("photo_form", "text_form"), [("NFC", "NFD"), ("NFD", "NFC")])
def test_accents_match_however_they_are_spelled(tmp_path: Path, photo_form: str, text_form: str) -> None:
    photo = tmp_path / (unicodedata.normalize(photo_form, "Köter é") + ".jpg")
    photo.write_bytes(b"")
    (tmp_path / (unicodedata.normalize(text_form, "Köter é") + ".txt")).write_text("ein Köter", encoding="utf-8")
    assert read_caption(photo) == "ein Köter"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\xef\xbb\xbfa dog", "a dog"),
        (b"  a dog \r\n on\tgrass\n\n", "a dog on grass"),
        ("Häschen".encode(), "Häschen"),
        (unicodedata.normalize("NFD", "Häschen").encode(), "Häschen"),
        (b"", None),
        (b"\xef\xbb\xbf \r\n", None),
    ],
)
def test_text_becomes_one_trimmed_line(photo: Path, data: bytes, expected: str | None) -> None:
    photo.with_suffix(".txt").write_bytes(data)
    assert read_caption(photo) == expected


@pytest.mark.parametrize(
    "data", ["Köter".encode("latin-1"), "a dog".encode("utf-16"), "a dog".encode("utf-16-le"), b"a dog\xff"]
)
def test_text_that_is_not_utf8_is_named(photo: Path, data: bytes) -> None:
    photo.with_suffix(".txt").write_bytes(data)
    with pytest.raises(ValueError, match=r"caption photo\.txt: got .* expected UTF-8 text; save"):
        read_caption(photo)


def test_two_captions_of_a_photo_are_refused(photo: Path) -> None:
    make(photo.parent, **{"photo.txt": b"one", "photo.caption": b"two"})
    with pytest.raises(ValueError, match=r"captions of photo\.jpg: got photo\.caption, photo\.txt"):
        read_caption(photo)


def test_a_caption_in_another_case_stays_with_the_photo_it_belongs_to(photo: Path) -> None:
    make(photo.parent, **{"Photo.jpg": b"", "Photo.txt": b"the capital one"})
    assert read_caption(photo) is None
    assert read_caption(photo.parent / "Photo.jpg") == "the capital one"
    make(photo.parent, **{"photo.txt": b"the small one"})
    assert read_caption(photo) == "the small one"
    assert read_caption(photo.parent / "Photo.jpg") == "the capital one"


def test_a_folder_or_hidden_file_is_no_caption(photo: Path) -> None:
    (photo.parent / "photo.txt").mkdir()
    make(photo.parent, **{"._photo.txt": b"junk"})
    assert read_caption(photo) is None


def test_sidecar_wins_over_the_instance_prompt() -> None:
    assert resolve_caption("a dog", "a photo of sks") == "a dog"
    assert resolve_caption(None, " a photo\nof sks ") == "a photo of sks"
    assert resolve_caption("", "a photo of sks") == "a photo of sks"
    for nothing in (None, "", "  \n"):
        with pytest.raises(ValueError, match="neither a caption file nor an instance prompt"):
            resolve_caption(None, nothing)


def test_preflight_sentence() -> None:
    assert captioned_sentence(3, 5) == "3 of 5 captioned"


@pytest.mark.parametrize(
    "name",
    ["photo.captions", "photo.md", "photo.json", "PHOTO.text", "photo.jpg.txt", "photo.txt.txt", "photo.jpg.caption"],
)
def test_wrong_extension_beside_a_photo_is_reported(photo: Path, name: str) -> None:
    make(photo.parent, **{name: b"a dog"})
    strays = stray_caption_files(photo.parent, [photo])
    assert list(strays) == [photo.parent / name]
    assert "must be named photo.txt; rename it" in strays[photo.parent / name]


def test_caption_without_a_photo_is_reported(photo: Path) -> None:
    make(
        photo.parent, **{"photo.txt": b"used", "phot0.txt": b"a dog", ".hidden.txt": b"x", "README": b"x", "a.md": b"x"}
    )
    strays = stray_caption_files(photo.parent, [photo])
    assert list(strays) == [photo.parent / "phot0.txt"]
    assert "no photo has this name" in strays[photo.parent / "phot0.txt"]


def test_notes_beside_a_captioned_photo_are_no_strays(photo: Path) -> None:
    make(photo.parent, **{"photo.txt": b"used", "photo.json": b"{}"})
    assert stray_caption_files(photo.parent, [photo]) == {}
