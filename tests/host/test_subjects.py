"""Data sets as published: what is read, how runs find their subject, what is refused."""

import json
from pathlib import Path

import pytest
from PIL import Image

from host.subjects import fill, match_subject, read_dataset, subject_words
from runtime.bundle import sha256_file

SHARED = Path(__file__).parents[3] / "shared" / "photos"
# The form of google/dreambooth's file, with fewer lines.
DREAMBOOTH = """Classes

subject_name,class
backpack,backpack
bear_plushie,stuffed animal
dog6,dog

Prompts

Object Prompts

prompt_list = [
'a {0} {1} in the jungle'.format(unique_token, class_token),
'a {0} {1} on top of pink fabric'.format(unique_token, class_token),
'a cube shaped {0} {1}'.format(unique_token, class_token)
]

Live Subject Prompts

prompt_list = [
'a {0} {1} in the jungle'.format(unique_token, class_token),
'a {0} {1} wearing a red hat'.format(unique_token, class_token)
]
"""


def save_photos(folder: Path, *colors: str) -> Path:
    folder.mkdir(parents=True)
    for number, color in enumerate(colors):
        Image.new("RGB", (8, 8), color).save(folder / f"{number:02d}.jpg")
    return folder


def concept(name: str, words: str, prompts: str) -> dict[str, str]:
    return {
        "instance_prompt": f"photo of a <new1> {words}",
        "class_prompt": words,
        "instance_data_dir": f"./benchmark_dataset/{name}",
        "class_data_dir": f"./regularization/{name}",
        "prompt_filename": f"prompts/{prompts}",
    }


@pytest.fixture
def dreambooth(tmp_path) -> Path:
    folder = tmp_path / "dreambooth" / "dataset"
    save_photos(folder / "dog6", "red", "green")
    save_photos(folder / "bear_plushie", "blue")
    (folder / "bear_plushie" / "notes.txt").write_text("no picture")
    (folder / "prompts_and_classes.txt").write_text(DREAMBOOTH)
    return folder


@pytest.fixture
def concepts(tmp_path) -> Path:
    """As the repository has it, its archive of photos unpacked beside the file."""
    folder = tmp_path / "customconcept101"
    (folder / "prompts").mkdir(parents=True)
    (folder / "prompts" / "dog.txt").write_text("Photo of a {}.\n{} swimming in a pool.\n\na sad {}.")
    (folder / "prompts" / "toy.txt").write_text("a {} on a shelf.\n")
    entries = [concept("pet_dog1", "dog", "dog.txt"), concept("toy_gnome", "toy gnome", "toy.txt")]
    (folder / "dataset.json").write_text(json.dumps(entries))
    save_photos(folder / "benchmark_dataset" / "pet_dog1", "red", "green")
    return folder


def test_dreambooth_is_read_as_published(dreambooth):
    subjects = {subject.name: subject for subject in read_dataset(dreambooth)}
    assert list(subjects) == ["bear_plushie", "dog6"]  # the backpack has no photos here
    bear, dog = subjects.values()
    assert (bear.class_words, dog.class_words) == ("stuffed animal", "dog")
    assert bear.prompts == ("a {} in the jungle", "a {} on top of pink fabric", "a cube shaped {}")
    assert dog.prompts == ("a {} in the jungle", "a {} wearing a red hat")
    assert [path.name for path in dog.photos.values()] == ["00.jpg", "01.jpg"]
    assert list(bear.photos) == [sha256_file(dreambooth / "bear_plushie" / "00.jpg")]
    assert [s.name for s in read_dataset(dreambooth.parent)] == ["bear_plushie", "dog6"]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the published file is not here")
def test_the_published_dreambooth_file_has_25_prompts_of_either_kind():
    subjects = {subject.name: subject for subject in read_dataset(SHARED)}
    assert list(subjects) == ["backpack", "cat", "dog", "red_cartoon", "teapot", "vase"]
    assert {len(subject.prompts) for subject in subjects.values()} == {25}
    assert subjects["cat"].prompts[10] == "a {} wearing a red hat"
    assert subjects["red_cartoon"].prompts[10] == "a {} with a wheat field in the background"
    assert subjects["red_cartoon"].class_words == "cartoon"


def test_customconcept101_is_read_as_published(concepts):
    (dog,) = read_dataset(concepts)
    assert (dog.name, dog.class_words) == ("pet_dog1", "dog")
    assert dog.prompts == ("Photo of a {}.", "{} swimming in a pool.", "a sad {}.")
    assert len(dog.photos) == 2


@pytest.mark.parametrize("place", ["customconcept101/toy_gnome", "benchmark_dataset/toy_gnome"])
def test_the_photos_of_customconcept101_may_lie_elsewhere(concepts, place):
    save_photos(concepts.parent / place, "blue")
    assert [subject.name for subject in read_dataset(concepts)] == ["pet_dog1", "toy_gnome"]
    assert [subject.name for subject in read_dataset(concepts.parent)] == ["pet_dog1", "toy_gnome"]


def test_a_run_finds_its_subject_by_the_bytes_of_its_photos(dreambooth, tmp_path):
    subjects = read_dataset(dreambooth)
    copied = tmp_path / "mine.jpeg"
    copied.write_bytes((dreambooth / "dog6" / "01.jpg").read_bytes())
    assert match_subject(subjects, [sha256_file(copied), "0" * 64], "run").name == "dog6"
    with pytest.raises(
        ValueError, match=r"run: none of its 1 photos is in the data set \(2 subjects, e\.g\. bear_plushie"
    ):
        match_subject(subjects, ["0" * 64], "run")
    (dreambooth / "bear_plushie" / "copy.jpg").write_bytes(copied.read_bytes())
    with pytest.raises(ValueError, match=r"those of several subjects of the data set \(bear_plushie, dog6\)"):
        match_subject(read_dataset(dreambooth), [sha256_file(copied)], "run")


@pytest.mark.parametrize(
    ("prompt", "class_words", "words"),
    [
        ("a photo of sks dog", "dog", "sks dog"),
        ("a photo of a sks dog on the beach", "dog", "sks dog"),
        ("photo of a <new1> action figure", "action figure", "<new1> action figure"),
        ("photo of <new1> sunglasses", "sunglasses", "<new1> sunglasses"),
        ("My cat sleeping.", "cat", "cat"),
        ("a photo of sks", "dog", "sks"),
        ("sks", "", "sks"),
        ("a 3d emoji of a trophy on a plain background", "", "trophy"),
        ("an image of sks on top of a table", "vase", "sks"),
        ("a photo of the hotdog stand", "dog", "hotdog stand"),
        ("a photo of a sks glass of water", "glass of water", "sks glass of water"),
        ("sks dogs, a portrait", "dog", "sks dogs"),
    ],
)
def test_the_instance_prompt_says_what_the_subject_is_called(prompt, class_words, words):
    assert subject_words(prompt, class_words) == words
    assert fill("a {} in the snow", words) == f"a {words} in the snow"


def test_an_instance_prompt_without_words_for_the_subject_is_refused():
    with pytest.raises(
        ValueError, match=r"no words for the subject are left\. Train with one such as 'a photo of sks dog'"
    ):
        subject_words("a photo of ")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("'a {0} {1} in the jungle'.format(unique_token, class_token),", "", "ok"),
        ("'a {0} {1} wearing a red hat'", "print('a {0} {1} in a hat')", "ok"),
        ("'a {0} {1} wearing a red hat'", "'a {1} wearing a red hat'", r"'Live Subject Prompts' has no list of lines"),
        ("Live Subject Prompts", "Other Prompts", r"'Live Subject Prompts' has no list of lines"),
        (
            ".format(unique_token, class_token)",
            "",
            r"'Object Prompts' has no list .* Get prompts_and_classes.txt again",
        ),
        (",dog\n", "\n", "ok"),
        (
            "subject_name,class\nbackpack,backpack\nbear_plushie,stuffed animal\ndog6,dog",
            "",
            r"got no lines such as 'dog6,dog'",
        ),
    ],
)
def test_a_dreambooth_file_of_another_form_is_refused_and_never_run(dreambooth, old, new, message):
    path = dreambooth / "prompts_and_classes.txt"
    assert old in DREAMBOOTH
    path.write_text(DREAMBOOTH.replace(old, new))
    if message == "ok":
        assert read_dataset(dreambooth)
        return
    with pytest.raises(ValueError, match=message):
        read_dataset(dreambooth)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("dataset.json", "[", r"dataset.json is not JSON .* Get dataset.json again as it is published"),
        ("dataset.json", "{}", r"expected a list of objects, each with the texts class_prompt, instance_data_dir"),
        ("dataset.json", '[{"class_prompt": "dog"}]', r"expected a list of objects"),
        ("prompts/dog.txt", "a dog\n", r"dog.txt: expected one prompt a line, each with \{\} for the subject"),
        ("prompts/dog.txt", None, r"names the prompts prompts/dog.txt, which are not beside it"),
    ],
)
def test_a_customconcept101_of_another_form_is_refused(concepts, name, content, message):
    path = concepts / name
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_dataset(concepts)


def test_a_folder_that_is_no_data_set_is_refused(tmp_path, concepts):
    with pytest.raises(
        ValueError, match=r"there is no such folder\. Give the one with DreamBooth's prompts_and_classes"
    ):
        read_dataset(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"got neither prompts_and_classes.txt nor dataset.json"):
        read_dataset(tmp_path / "empty")
    for path in (concepts / "benchmark_dataset" / "pet_dog1").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match=r"names subjects, but none of their folders with photos is beside it"):
        read_dataset(concepts)
