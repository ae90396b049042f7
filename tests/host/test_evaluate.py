"""Scores and their intervals: known answers, and coverage on simulated data."""

import math

import numpy as np
import pytest
from PIL import Image

from host import evaluate
from host.evaluate import drift, picture_scores, prompt_fidelity, subject_fidelity, summarise, summarise_difference


def unit(*rows: list[float]) -> np.ndarray:
    array = np.asarray(rows, np.float32)
    return array / np.linalg.norm(array, axis=1, keepdims=True)


def test_subject_fidelity_is_the_mean_cosine_to_all_photos():
    got = subject_fidelity(unit([1, 0], [1, 1]), unit([1, 0], [0, 1]))
    np.testing.assert_allclose(got, [0.5, math.sqrt(0.5)], rtol=1e-6)


def test_prompt_fidelity_is_the_cosine_to_the_own_prompt():
    np.testing.assert_allclose(
        prompt_fidelity(unit([1, 0], [1, 1]), unit([0, 1], [1, 0])), [0, math.sqrt(0.5)], atol=1e-6
    )


def test_drift_is_nothing_where_the_pictures_are_the_same_and_one_where_they_have_nothing_in_common():
    np.testing.assert_allclose(drift(unit([3, 4], [1, 0]), unit([3, 4], [0, 1])), [0, 1], atol=1e-6)


def test_a_model_without_text_gives_subject_fidelity_alone():
    pictures, photos = unit([1, 0]), unit([1, 0])
    assert list(picture_scores(pictures, photos)) == ["subject"]
    assert list(picture_scores(pictures, photos, unit([0, 1]))) == ["subject", "prompt"]


def test_similarity_of_a_photo_to_itself_is_one():
    rng = np.random.default_rng(0)
    photo = Image.fromarray(rng.integers(0, 255, (64, 64, 3), np.uint8))
    np.testing.assert_allclose(evaluate.subject_similarity([photo], [photo]), [1], atol=1e-5)


def test_each_subject_counts_the_same_however_many_pictures_it_has():
    summary = summarise([1, 1, 1, 1, 0], ["a", "a", "a", "a", "b"])
    assert (summary.mean, summary.subjects, summary.pictures) == (0.5, 2, 5)


def test_the_interval_of_equal_scores_is_that_score():
    summary = summarise([0.25] * 6, list("aabbcc"))
    assert (summary.low, summary.mean, summary.high) == (0.25, 0.25, 0.25)


def test_two_subjects_give_their_whole_range():
    """Known answer: half of the resamples have both subjects, a quarter each one alone, and the tail asked for is tiny."""
    summary = summarise([0.0, 0.0, 1.0, 1.0], list("aabb"))
    assert (summary.low, summary.high) == (0.0, 1.0)


def test_intervals_of_many_pictures_of_one_subject_are_those_of_the_normal_mean():
    values = np.random.default_rng(3).normal(0.4, 0.1, 400)
    summary = summarise(values.tolist(), ["a"] * 400)
    half = 1.96 * values.std(ddof=1) / 20
    assert summary.low == pytest.approx(values.mean() - half, abs=0.15 * half)
    assert summary.high == pytest.approx(values.mean() + half, abs=0.15 * half)


def test_the_same_seed_gives_the_same_interval_and_another_seed_another():
    values, subjects = np.random.default_rng(0).random(20).tolist(), list("abcde") * 4
    assert summarise(values, subjects) == summarise(values, subjects)
    assert summarise(values, subjects, seed=1) != summarise(values, subjects)


def test_pairs_are_resampled_together():
    """The pictures vary much, their difference hardly: taken one by one the interval would be forty times as long."""
    rng = np.random.default_rng(1)
    base = rng.normal(0.5, 0.2, 60)
    adapter = base + 0.1 + rng.normal(0, 0.005, 60)
    subjects = [str(i % 6) for i in range(60)]
    difference = summarise_difference(adapter.tolist(), base.tolist(), subjects)
    alone = summarise(adapter.tolist(), subjects)
    assert 0.09 < difference.low < 0.1 < difference.high < 0.11
    assert difference.high - difference.low < 0.1 * (alone.high - alone.low)


@pytest.mark.parametrize(
    ("num_subjects", "between", "within"), [(1, 0.0, 1.0), (8, 1.0, 0.3), (12, 0.7, 1.0), (30, 0.3, 1.0)]
)
def test_the_interval_holds_the_true_mean_about_95_times_of_100(num_subjects, between, within):
    """200 simulated evaluations of ten pictures a subject, whose true mean is 0."""
    rng, hits = np.random.default_rng(0), 0
    pictures = 10 if num_subjects > 1 else 40
    names = [str(subject) for subject in range(num_subjects) for _ in range(pictures)]
    for trial in range(200):
        own = rng.normal(0, between, num_subjects)[:, None]
        values = own + rng.normal(0, within, (num_subjects, pictures))
        summary = summarise(values.ravel().tolist(), names, resamples=400, seed=trial)
        hits += summary.low <= 0 <= summary.high
    assert 180 <= hits <= 198


def test_subjects_not_pictures_decide_how_wide_it_is():
    """More pictures of the same six subjects hardly narrow the interval; more subjects do."""
    rng = np.random.default_rng(2)

    def width(num_subjects: int, pictures: int) -> float:
        own = rng.normal(0, 1, num_subjects)[:, None] + rng.normal(0, 0.3, (num_subjects, pictures))
        names = [str(i) for i in range(num_subjects) for _ in range(pictures)]
        return (summary := summarise(own.ravel().tolist(), names)).high - summary.low

    assert width(6, 200) > 2 * width(60, 20)


@pytest.mark.parametrize(
    ("values", "subjects", "message"),
    [
        ([], [], "got 0 scores and 0 subjects, expected as many of both, at least one"),
        ([1.0], ["a", "b"], "got 1 scores and 2 subjects"),
        ([1.0, float("nan")], ["a", "b"], "got NaN or infinity"),
    ],
)
def test_scores_that_cannot_be_summarised_are_refused(values, subjects, message):
    with pytest.raises(ValueError, match=message):
        summarise(values, subjects)


def test_unpaired_scores_are_refused():
    with pytest.raises(ValueError, match="got 2 scores of the adapter and 1 of the base, expected pairs"):
        summarise_difference([1.0, 2.0], [1.0], ["a", "a"])
