"""The background a prompt names, as a classification: what is parsed, how sure the classifier is, what is kept."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from host.tiny_base import backgrounds, subject, world
from host.tiny_base.backgrounds import background_scores, backgrounds_of, load_classifier

NAMES = world.background_names()


@pytest.fixture(scope="module")
def drawn():
    """A classifier trained on a few drawn objects in place of the emoji, which come from npm."""

    def load(labels):
        found = []
        for number, label in enumerate(labels):
            image, rng = Image.new("RGBA", (64, 64)), np.random.default_rng(len(label) + number)
            color = (*(int(value) for value in rng.integers(0, 255, 3)), 255)
            ImageDraw.Draw(image).ellipse((number % 9, 4, 62 - number % 7, 60), color)
            found.append(world.Emoji(label, image))
        return found

    patch = pytest.MonkeyPatch()
    patch.setattr(world, "load_emoji", load)
    patch.setattr(world, "vocabulary", lambda: [f"thing {i}" for i in range(8)])
    patch.setattr(world, "holdout", lambda: [f"other thing {i}" for i in range(4)])
    patch.setattr(world, "EMOJI_PACKAGE", "drawn by a test")  # a key of its own in the cache
    load_classifier.cache_clear()
    yield load_classifier()
    load_classifier.cache_clear()
    patch.undo()


def test_every_prompt_of_the_world_names_its_background():
    for label in ("trophy", "a on b", "sks cup on the beach"):
        assert backgrounds_of([world.prompt_of(label, name) for name in NAMES]) == list(NAMES)


@pytest.mark.parametrize(
    "prompt",
    [
        "a 3d emoji of a trophy on a plain background",
        "a photo of a dog on the beach",
        "a 3d emoji of a trophy",
        "a 3d emoji of a  on the beach at night",
        "a 3d emoji of a trophy on the beaches",
        "",
    ],
)
def test_other_prompts_name_none(prompt):
    assert backgrounds_of([prompt]) == [None]


def test_held_out_pictures_are_told_apart(drawn):
    assert drawn.accuracy >= 0.95
    assert drawn.tested == 4 * 16 * backgrounds.TEST_VARIANTS


def test_the_probability_is_that_of_the_named_background(drawn):
    rng = np.random.default_rng(9)
    (emoji,) = world.load_emoji(["a thing never seen"])
    pictures = [world.compose(emoji.image, world.draw_background(name, rng), 0.8, (0, 3)) for name in NAMES]
    probability, right = background_scores(drawn, pictures, NAMES)
    np.testing.assert_array_equal(right, 1)
    assert probability.min() > 0.5
    shifted = [*NAMES[1:], NAMES[0]]
    wrong_probability, wrong = background_scores(drawn, pictures, shifted)
    np.testing.assert_array_equal(wrong, 0)
    assert wrong_probability.max() < 0.5
    np.testing.assert_allclose(drawn.probabilities(pictures).sum(1), 1, rtol=1e-5)


def test_pictures_of_any_size_are_taken(drawn):
    large = Image.fromarray(world.draw_background("the grass", np.random.default_rng(0), 512))
    _, right = background_scores(drawn, [large], ["the grass"])
    assert right.tolist() == [1]


def test_it_is_made_once_and_is_the_same_when_made_again(drawn, monkeypatch, tmp_path):
    load_classifier.cache_clear()
    monkeypatch.setattr(backgrounds, "_build", lambda folder: pytest.fail("made again"))
    assert torch.equal(load_classifier().weight, drawn.weight)
    monkeypatch.undo()
    load_classifier.cache_clear()
    monkeypatch.setenv("POCKETDIT_CACHE", str(tmp_path))
    again = load_classifier()
    torch.testing.assert_close(again.weight, drawn.weight, rtol=0, atol=0)
    assert again.accuracy == drawn.accuracy


def test_the_fit_of_separable_points_separates_them():
    rows = torch.arange(16).repeat(4)
    features = torch.nn.functional.one_hot(rows, 20).float() + 0.01 * torch.randn(64, 20)
    weight, bias = backgrounds.fit(features, rows)
    assert ((features @ weight + bias).argmax(1) == rows).all()


@pytest.mark.long
def test_on_the_emoji_themselves_at_least_98_percent_of_held_out_pictures_are_right(tmp_path, monkeypatch):
    monkeypatch.setenv("POCKETDIT_CACHE", str(tmp_path))
    load_classifier.cache_clear()
    try:
        classifier = load_classifier()
    except ValueError as error:
        pytest.skip(str(error))
    finally:
        load_classifier.cache_clear()
    assert classifier.accuracy >= 0.98
    photos = sorted(subject.FOLDER.glob("*.jpg"))
    _, right = background_scores(classifier, [Image.open(path) for path in photos], subject.BACKGROUNDS)
    assert right.tolist() == [1] * 5
