"""Dynamic patch sampling of DiT-BlockSkip (arXiv 2603.20755): how large a crop each noise level gets, and where it lies.

Reads upright RGB photos. Writes crops as arrays and the picture of the crops for the report; nothing on disk.
Command: `pytest tests/host/test_patches.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from PIL import Image, ImageDraw, ImageFont

Policy = Literal["low-to-high", "high-to-low", "random", "resize", "full"]
LANCZOS, BICUBIC = Image.Resampling.LANCZOS, Image.Resampling.BICUBIC

# Noise colours of the figure, even steps of the magma colour map between its too dark and too pale ends.
NOISE_COLORS = np.array([(59, 15, 112), (140, 41, 129), (222, 73, 104), (254, 159, 109), (252, 224, 160)], np.float64)
PAPER, INK, SOFT = (255, 255, 255), (34, 34, 38), (112, 110, 106)
FIGURE_HEIGHT, GAP, TEXT_HEIGHT, FONT_SIZE = 560, 14, 36, 13
MAX_TILES, LEGEND_WIDTH = 12, 270


@dataclass(frozen=True, slots=True)
class CropBox:
    """A square of the prepared photo."""

    left: int
    """Pixels from the left edge."""
    top: int
    """Pixels from the top edge."""
    side: int
    """Pixels, of width and height."""
    flipped: bool
    """Whether the patch is mirrored left to right."""


def sample_rng(seed: int, index: int) -> np.random.Generator:
    """The random numbers of one sample: the same however many samples there are and whichever process draws them.

    Args:
        seed: Of the whole pool, not negative.
        index: Of the sample, not negative.
    """
    if seed < 0 or index < 0:
        raise ValueError(f"sample seed: got seed {seed}, index {index}, expected none below 0; choose a positive seed")
    return np.random.default_rng(np.random.SeedSequence([seed, index]))


def crop_side(
    sigma: float,
    *,
    side_min: int,
    side_max: int,
    multiple: int,
    policy: Policy,
    rng: np.random.Generator | None = None,
) -> int:
    """The side of the crop at a noise level, in pixels of the prepared photo.

    Args:
        sigma: Share of noise, in [0, 1].
        side_min: Side of the smallest crop, a multiple of `multiple`.
        side_max: Side of the largest crop, a multiple of `multiple`.
        multiple: The autoencoder's spatial factor times the transformer's patch size; 16 in the paper.
        policy: `low-to-high` is the paper's `s_min + sigma (s_max - s_min)`, large crops at high noise, `high-to-low` the
            reverse, `random` any multiple with equal chance, `resize` and `full` always `side_max`.
        rng: Needed by `random` alone.

    Returns:
        A multiple of `multiple` from `side_min` to `side_max`.

    Raises:
        ValueError: If an argument is out of range.
    """
    if policy not in get_args(Policy):
        expected = ", ".join(get_args(Policy))
        raise ValueError(f"crop policy: got {policy!r}, expected one of {expected}; choose one of them")
    if multiple < 1 or not multiple <= side_min <= side_max or side_min % multiple or side_max % multiple:
        raise ValueError(
            f"crop sides: got {side_min} to {side_max} px, expected rising multiples of {multiple}, the size of a token; "
            "round both to such multiples"
        )
    if not 0 <= sigma <= 1:
        raise ValueError(f"sigma: got {sigma}, expected 0 to 1; divide a timestep by 1000")
    if policy in ("resize", "full"):
        return side_max
    if policy == "random":
        if rng is None:
            raise ValueError("crop policy random: got no rng, expected a generator; pass sample_rng(seed, index)")
        return multiple * int(rng.integers(side_min // multiple, side_max // multiple + 1))
    share = sigma if policy == "low-to-high" else 1 - sigma
    side = side_min + share * (side_max - side_min)
    return multiple * math.floor(side / multiple + 0.5)


def default_side(image_side: int, multiple: int) -> int:
    """Side of the patches where none is given, pixels: half of the picture's, made of whole tokens."""
    return max(1, image_side // 2 // multiple) * multiple


def require_side(name: str, side: int, multiple: int) -> None:
    """Refuses sides that are not made of whole tokens.

    Raises:
        ValueError: Says which setting.
    """
    if side < multiple or side % multiple:
        lower = max(1, side // multiple) * multiple
        raise ValueError(
            f"{name}: got {side}, expected a multiple of {multiple} (autoencoder x patch) pixels, such as {lower}."
        )


def prepared_size(size: tuple[int, int], side_max: int) -> tuple[int, int]:
    """Width and height of a photo after `prepare`: the shorter side is `side_max`, the aspect is kept."""
    if min(*size, side_max) < 1:
        raise ValueError(
            f"photo: got {size[0]}x{size[1]} px for a side of {side_max} px, expected at least 1; check both"
        )
    width, height = (max(side_max, round(side * side_max / min(size))) for side in size)
    return width, height


def prepare(image: Image.Image, side_max: int) -> Image.Image:
    """Scales a photo so that its shorter side is `side_max`, without stretching it; `host/photos.py` reports upscaling.

    Args:
        image: Upright RGB photo.
        side_max: Pixels.
    """
    if image.mode != "RGB":
        raise ValueError(f"photo: got mode {image.mode}, expected RGB; convert it with host.decode.to_rgb")
    return _resized(image, prepared_size(image.size, side_max))


def draw_crop(
    rng: np.random.Generator,
    prepared_size: tuple[int, int],
    sigma: float,
    *,
    side_min: int,
    side_max: int,
    multiple: int,
    policy: Policy,
    flip_probability: float = 0.0,
) -> CropBox:
    """Draws a crop anywhere in the prepared photo; every position is as likely.

    Args:
        rng: The sample's own, from `sample_rng`.
        prepared_size: Width and height of the prepared photo, pixels.
        sigma: Share of noise, in [0, 1].
        side_min: See `crop_side`.
        side_max: See `crop_side`.
        multiple: See `crop_side`.
        policy: See `crop_side`.
        flip_probability: Chance of mirroring, in [0, 1].

    Raises:
        ValueError: If an argument is out of range or the crop is larger than the photo.
    """
    if not 0 <= flip_probability <= 1:
        raise ValueError(f"flip probability: got {flip_probability}, expected 0 to 1; 0 never mirrors")
    side = crop_side(sigma, side_min=side_min, side_max=side_max, multiple=multiple, policy=policy, rng=rng)
    width, height = prepared_size
    if side > min(width, height):
        raise ValueError(
            f"crop: got a side of {side} px for a photo of {width}x{height} px, expected one that fits; "
            f"prepare the photo with side_max={side_max}"
        )
    left, top = int(rng.integers(width - side + 1)), int(rng.integers(height - side + 1))
    return CropBox(left, top, side, bool(rng.random() < flip_probability))


def cut(prepared: Image.Image, box: CropBox, side_out: int) -> np.ndarray:
    """Cuts a crop out and scales it, antialiased, to the side that is trained on.

    Args:
        prepared: RGB photo from `prepare`.
        box: The crop, inside the photo.
        side_out: Pixels; `side_min`, or `side_max` under the policy `full`.

    Returns:
        pixels: (3, side_out, side_out) float32 in [-1, 1], writable.

    Raises:
        ValueError: If the crop does not lie inside the photo, or the photo is not RGB.
    """
    pixels = np.asarray(_patch(prepared, box, side_out), np.float32)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)) / np.float32(127.5) - np.float32(1)


def crops_figure(prepared: Image.Image, crops: Sequence[tuple[CropBox, float]], side_out: int) -> Image.Image:
    """Draws how the crop follows the noise: the photo with its crops, beside the patches from low to high noise.

    Args:
        prepared: RGB photo from `prepare`.
        crops: Crops of this photo with their sigmas, at least one; of many, 12 spread over the noise levels are shown.
        side_out: Side of the patches that are trained on, pixels.

    Returns:
        An RGB picture, at most about 600 pixels high.
    """
    if not crops:
        raise ValueError("crops figure: got no crop, expected at least one; draw samples for this photo first")
    ordered = sorted(crops, key=lambda crop: crop[1])
    picks = sorted({round(index) for index in np.linspace(0, len(ordered) - 1, min(MAX_TILES, len(ordered)))})
    shown = [ordered[index] for index in picks]
    scale = min((FIGURE_HEIGHT - TEXT_HEIGHT - GAP) / prepared.height, 1.5 * FIGURE_HEIGHT / prepared.width)
    photo = prepared.resize((round(prepared.width * scale), round(prepared.height * scale)), LANCZOS)
    num_columns = min(4, len(shown))
    num_rows = math.ceil(len(shown) / num_columns)
    tile = min(180, (FIGURE_HEIGHT - (num_rows - 1) * GAP) // num_rows - TEXT_HEIGHT)
    photo_column = max(photo.width, LEGEND_WIDTH)
    left = photo_column + 3 * GAP
    width = left + num_columns * (tile + GAP)
    height = max(photo.height + GAP + TEXT_HEIGHT, num_rows * (tile + TEXT_HEIGHT + GAP) - GAP) + 2 * GAP
    figure = Image.new("RGB", (width, height), PAPER)
    figure.paste(photo, (GAP, GAP))
    draw = ImageDraw.Draw(figure)
    font = ImageFont.load_default(FONT_SIZE)
    # The largest first, or they would cover the small ones.
    for box, sigma in sorted(shown, key=lambda crop: -crop[0].side):
        edges = [GAP + round(edge * scale) for edge in (box.left, box.top, box.left + box.side, box.top + box.side)]
        edges[2:] = [edges[2] - 1, edges[3] - 1]
        draw.rectangle(edges, outline=PAPER, width=5)
        draw.rectangle([edges[0] + 1, edges[1] + 1, edges[2] - 1, edges[3] - 1], outline=_noise_color(sigma), width=3)
    _draw_legend(draw, font, GAP, 2 * GAP + photo.height, photo_column)
    for number, (box, sigma) in enumerate(shown):
        row, column = divmod(number, num_columns)
        x, y = left + column * (tile + GAP), GAP + row * (tile + TEXT_HEIGHT + GAP)
        patch = _patch(prepared, box, side_out).resize((tile, tile), LANCZOS)
        figure.paste(patch, (x, y))
        draw.rectangle((x, y + tile, x + tile - 1, y + tile + 4), fill=_noise_color(sigma))
        draw.text((x, y + tile + 8), f"sigma {sigma:.2f}", INK, font)
        draw.text((x + tile, y + tile + 8), f"{box.side} px", SOFT, font, anchor="ra")
    return figure


def _draw_legend(
    draw: ImageDraw.ImageDraw, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, x: int, y: int, width: int
) -> None:
    for column in range(width):
        draw.line((x + column, y, x + column, y + 8), fill=_noise_color(column / max(1, width - 1)))
    draw.text((x, y + 14), "low noise: detail", INK, font)
    draw.text((x + width, y + 14), "high noise: structure", INK, font, anchor="ra")


def _noise_color(sigma: float) -> tuple[int, int, int]:
    stops = np.linspace(0, 1, len(NOISE_COLORS))
    red, green, blue = (round(float(np.interp(sigma, stops, channel))) for channel in NOISE_COLORS.T)
    return red, green, blue


def _patch(prepared: Image.Image, box: CropBox, side_out: int) -> Image.Image:
    right, bottom = box.left + box.side, box.top + box.side
    inside = box.left >= 0 and box.top >= 0 and box.side >= 1 and right <= prepared.width and bottom <= prepared.height
    if prepared.mode != "RGB" or not inside:
        raise ValueError(
            f"crop: got {box} of a {prepared.mode} photo of {prepared.width}x{prepared.height} px, "
            "expected one inside an RGB photo; prepare the photo as when the crop was drawn"
        )
    patch = _resized(prepared.crop((box.left, box.top, right, bottom)), (side_out, side_out))
    return patch.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if box.flipped else patch


def _resized(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    if image.size == size:
        return image.copy()
    return image.resize(size, LANCZOS if size[0] < image.width or size[1] < image.height else BICUBIC)
