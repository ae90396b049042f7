"""Dynamic patches: sides follow the noise, crops stay in the photo, a sample does not depend on its neighbours."""

import numpy as np
import pytest
from numpy.testing import assert_allclose
from PIL import Image

from host.patches import CropBox, crop_side, crops_figure, cut, draw_crop, prepare, prepared_size, sample_rng

POLICIES = ["low-to-high", "high-to-low", "random", "resize", "full"]
PAPER = {"side_min": 256, "side_max": 512, "multiple": 16}


def noise_picture(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def blend(width: int, height: int) -> Image.Image:
    """Red grows to the right, green downwards, blue is constant."""
    red, green = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([red, green, np.full_like(red, 77)], -1).round().astype(np.uint8))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("side_min", "side_max", "multiple"), [(256, 512, 16), (512, 1024, 32), (64, 128, 8), (96, 96, 32)]
)
def test_side_is_a_multiple_within_the_limits(policy: str, side_min: int, side_max: int, multiple: int) -> None:
    rng = np.random.default_rng(0)
    for sigma in np.linspace(0, 1, 201):
        side = crop_side(sigma, side_min=side_min, side_max=side_max, multiple=multiple, policy=policy, rng=rng)
        assert side % multiple == 0
        assert side_min <= side <= side_max


def test_sides_of_the_paper() -> None:
    """256 to 512 in steps of 16: 256 + 256 * sigma, rounded."""
    sigmas = [0.0, 0.031, 0.032, 0.25, 0.5, 0.968, 0.969, 1.0]
    rising = [crop_side(sigma, policy="low-to-high", **PAPER) for sigma in sigmas]
    assert rising == [256, 256, 272, 320, 384, 496, 512, 512]
    assert [crop_side(1 - sigma, policy="high-to-low", **PAPER) for sigma in sigmas] == rising
    assert {crop_side(sigma, policy=policy, **PAPER) for sigma in sigmas for policy in ("resize", "full")} == {512}


def test_random_sides_are_uniform_and_ignore_the_noise() -> None:
    rng = np.random.default_rng(0)
    sides = [crop_side(0.0, policy="random", rng=rng, **PAPER) for _ in range(17_000)]
    values, counts = np.unique(sides, return_counts=True)
    assert list(values) == list(range(256, 513, 16))
    assert_allclose(counts, 1000, atol=5 * np.sqrt(1000))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"policy": "up"}, "crop policy: got 'up', expected one of low-to-high"),
        ({"policy": "random"}, "random: got no rng"),
        ({"side_min": 250}, "crop sides: got 250 to 512 px"),
        ({"side_max": 500}, "crop sides: got 256 to 500 px"),
        ({"side_max": 128}, "crop sides: got 256 to 128 px"),
        ({"multiple": 0}, "rising multiples of 0"),
        ({"sigma": 1000}, "sigma: got 1000, expected 0 to 1"),
        ({"sigma": float("nan")}, "sigma: got nan"),
    ],
)
def test_bad_settings_are_named(change: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        crop_side(**{"sigma": 0.5, "policy": "low-to-high", **PAPER, **change})


@pytest.mark.parametrize("size", [(512, 512), (780, 781), (4000, 3000), (100, 333), (513, 512), (3001, 300)])
def test_prepare_makes_the_shorter_side_exact_and_keeps_the_aspect(size: tuple[int, int]) -> None:
    prepared = prepare(blend(*size), 128)
    assert prepared.size == prepared_size(size, 128)
    assert min(prepared.size) == 128
    assert abs(max(prepared.size) - 128 * max(size) / min(size)) <= 0.5
    # The corners keep their places: nothing is cut off.
    assert_allclose(prepared.getpixel((prepared.width - 1, 0)), (255, 0, 77), atol=4)
    assert_allclose(prepared.getpixel((0, prepared.height - 1)), (0, 255, 77), atol=4)


def test_prepare_refuses_other_modes_and_leaves_its_argument_alone() -> None:
    with pytest.raises(ValueError, match="got mode RGBA, expected RGB"):
        prepare(Image.new("RGBA", (9, 9)), 8)
    image = noise_picture(64, 64)
    prepare(image, 64).putpixel((0, 0), (1, 2, 3))
    assert image.tobytes() == noise_picture(64, 64).tobytes()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("size", [(512, 512), (512, 900), (700, 512)])
def test_crops_lie_inside_and_reach_every_edge(policy: str, size: tuple[int, int]) -> None:
    rng, sigma = np.random.default_rng(0), {"high-to-low": 1.0}.get(policy, 0.0)
    boxes = [draw_crop(rng, size, sigma, policy=policy, **PAPER) for _ in range(4000)]
    lefts, tops = [box.left for box in boxes], [box.top for box in boxes]
    rights, bottoms = [box.left + box.side for box in boxes], [box.top + box.side for box in boxes]
    assert (min(lefts), min(tops), max(rights), max(bottoms)) == (0, 0, *size)
    if policy in ("low-to-high", "high-to-low"):
        assert {box.side for box in boxes} == {256}
        assert_allclose(np.mean(lefts), (size[0] - 256) / 2, atol=5 * (size[0] - 256) / np.sqrt(12 * 4000))


def test_flips_follow_their_probability_and_do_not_move_the_crop() -> None:
    boxes = {
        probability: [
            draw_crop(sample_rng(1, index), (600, 512), 0.5, policy="random", flip_probability=probability, **PAPER)
            for index in range(2000)
        ]
        for probability in (0.0, 0.25, 1.0)
    }
    shares = {probability: np.mean([box.flipped for box in drawn]) for probability, drawn in boxes.items()}
    assert shares[0.0] == 0
    assert shares[1.0] == 1
    assert abs(shares[0.25] - 0.25) < 0.05
    places = [[(box.left, box.top, box.side) for box in drawn] for drawn in boxes.values()]
    assert places[0] == places[1] == places[2]


def test_draw_refuses_photos_that_are_too_small_and_odd_probabilities() -> None:
    with pytest.raises(ValueError, match="crop: got a side of 512 px for a photo of 511x900 px"):
        draw_crop(sample_rng(0, 0), (511, 900), 1.0, policy="low-to-high", **PAPER)
    with pytest.raises(ValueError, match="flip probability: got 2"):
        draw_crop(sample_rng(0, 0), (512, 512), 1.0, policy="full", flip_probability=2, **PAPER)


def test_a_sample_is_the_same_whoever_draws_it() -> None:
    def draw(index: int) -> CropBox:
        return draw_crop(sample_rng(7, index), (700, 512), 0.4, policy="random", flip_probability=0.5, **PAPER)

    pool = [draw(index) for index in range(20)]
    assert [draw(index) for index in reversed(range(20))] == pool[::-1]
    assert len(set(pool)) > 15
    assert sample_rng(7, 0).random() != sample_rng(8, 0).random()
    assert sample_rng(1, 2).random() != sample_rng(2, 1).random()
    with pytest.raises(ValueError, match="got seed -1"):
        sample_rng(-1, 0)


def test_cut_without_scaling_is_exact() -> None:
    image = noise_picture(40, 30)
    patch = cut(image, CropBox(7, 5, 16, False), 16)
    assert patch.shape == (3, 16, 16)
    assert patch.dtype == np.float32
    assert patch.flags.writeable
    expected = np.asarray(image)[5:21, 7:23].transpose(2, 0, 1) / 127.5 - 1
    assert_allclose(patch, expected, atol=1e-6)
    assert_allclose(cut(image, CropBox(7, 5, 16, True), 16), expected[:, :, ::-1], atol=1e-6)


def test_cut_covers_the_range_from_minus_one_to_one() -> None:
    image = Image.new("RGB", (32, 32), (0, 255, 255))
    patch = cut(image, CropBox(0, 0, 32, False), 16)
    assert patch[0].max() == -1
    assert patch[1:].min() == 1


def test_cut_scales_the_crop_alone_and_antialiased() -> None:
    """A one-pixel checkerboard becomes grey, not a moiré; what lies outside of the crop does not bleed in."""
    checks = ((np.indices((64, 64)).sum(0) % 2) * 255).astype(np.uint8)
    board = np.full((96, 96), 255, np.uint8)
    board[16:80, 16:80] = checks
    patch = cut(Image.fromarray(np.stack([board] * 3, -1)), CropBox(16, 16, 64, False), 16)
    assert_allclose(patch[:, 2:-2, 2:-2], 0, atol=0.02)
    assert abs(patch.mean()) < 0.02


def test_cut_refuses_a_crop_that_leaves_the_photo() -> None:
    for box in (CropBox(-1, 0, 8, False), CropBox(0, 25, 8, False), CropBox(33, 0, 8, False), CropBox(0, 0, 0, False)):
        with pytest.raises(ValueError, match="expected one inside an RGB photo"):
            cut(noise_picture(40, 30), box, 8)


@pytest.mark.parametrize(("size", "count", "num_rows"), [((128, 128), 40, 3), ((400, 128), 8, 2), ((128, 1500), 1, 1)])
def test_figure_shows_the_photo_and_the_patches_from_low_to_high_noise(
    size: tuple[int, int], count: int, num_rows: int
) -> None:
    photo = Image.new("RGB", size, (10, 200, 30))
    sides = {"side_min": 64, "side_max": 128, "multiple": 8}
    crops = [
        (draw_crop(sample_rng(0, index), size, sigma, policy="low-to-high", **sides), sigma)
        for index, sigma in enumerate(np.random.default_rng(0).random(count))
    ]
    figure = crops_figure(photo, crops, 64)
    pixels = np.asarray(figure).astype(int)
    green = (pixels == (10, 200, 30)).all(-1)
    assert figure.mode == "RGB"
    assert 400 < figure.height < 700
    assert green[:, 14 : 14 + 20].any()  # the photo, at the left margin
    column = figure.width - 40  # through the last tile of each row
    ends = np.flatnonzero(np.diff(green[:, column].astype(int)) == -1)
    assert len(ends) == num_rows
    brightness = [pixels[end + 2, column].sum() for end in ends]
    assert brightness == sorted(brightness)  # the bar under each tile has the colour of its noise level
    assert len(set(brightness)) == num_rows


def test_figure_refuses_no_crops() -> None:
    with pytest.raises(ValueError, match="crops figure: got no crop"):
        crops_figure(noise_picture(64, 64), [], 64)
