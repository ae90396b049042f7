"""The noise schedule: distribution, stratification, and the straight path from picture to noise."""

from statistics import NormalDist

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from host.schedule import add_noise, sample_sigmas, shift_sigma, timestep, velocity


def quantile_of(sigmas: np.ndarray) -> np.ndarray:
    """Inverse of the logit-normal quantile function, by another route than the code's."""
    return np.array([NormalDist().cdf(np.log(sigma / (1 - sigma))) for sigma in sigmas])


@pytest.mark.parametrize("count", [1, 7, 64])
def test_each_equally_probable_bin_gets_one_uniform_draw(count: int) -> None:
    sigmas = sample_sigmas(np.random.default_rng(3), count, distribution="uniform")
    assert sigmas.shape == (count,)
    assert sigmas.dtype == np.float64
    assert sorted(np.floor(sigmas * count)) == list(range(count))


@pytest.mark.parametrize("shift", [1.0, 3.0, 0.5])
def test_each_equally_probable_bin_gets_one_logit_normal_draw(shift: float) -> None:
    sigmas = sample_sigmas(np.random.default_rng(3), 50, distribution="logit_normal", shift=shift)
    quantiles = quantile_of(shift_sigma(sigmas, 1 / shift))
    assert sorted(np.floor(quantiles * 50)) == list(range(50))


def test_draws_are_shuffled_and_follow_the_rng() -> None:
    first, again = (sample_sigmas(np.random.default_rng(5), 100) for _ in range(2))
    assert_allclose(first, again, rtol=0)
    assert abs(np.corrcoef(first, np.arange(100))[0, 1]) < 0.3
    assert not np.array_equal(first, sample_sigmas(np.random.default_rng(6), 100))


def test_moments_are_those_of_the_logit_normal() -> None:
    logits = np.log(1 / sample_sigmas(np.random.default_rng(0), 20_000) - 1)
    assert_allclose([logits.mean(), logits.std()], [0, 1], atol=5e-3)


@pytest.mark.parametrize("distribution", ["uniform", "logit_normal"])
@pytest.mark.parametrize("shift", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("draw", [0.0, 1 - 2.0**-53])
def test_sigmas_stay_inside_the_open_interval(distribution: str, shift: float, draw: float) -> None:
    class Extreme:
        def permutation(self, count: int) -> np.ndarray:
            return np.arange(count)

        def random(self, count: int) -> np.ndarray:
            return np.full(count, draw)

    sigmas = sample_sigmas(Extreme(), 4, distribution=distribution, shift=shift)  # type: ignore[arg-type]
    assert sigmas.min() > 0
    assert sigmas.max() < 1


def test_shift_keeps_the_ends_and_composes() -> None:
    sigma = np.linspace(0, 1, 11)
    assert_allclose(shift_sigma(sigma, 1.0), sigma)
    assert_allclose(shift_sigma(np.array([0.0, 0.5, 1.0]), 3.0), [0.0, 0.75, 1.0])
    assert_allclose(shift_sigma(shift_sigma(sigma, 3.0), 2.0), shift_sigma(sigma, 6.0))
    assert shift_sigma(0.5, 3.0) == 0.75


def test_timestep_is_a_thousand_times_sigma() -> None:
    assert timestep(0.25) == 250
    assert_allclose(timestep(np.array([0.1, 1.0])), [100, 1000])
    torch.testing.assert_close(timestep(torch.tensor([0.5])), torch.tensor([500.0]))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("batched", [False, True])
def test_noise_lies_on_the_path_whose_slope_is_the_velocity(kind: str, batched: bool) -> None:
    rng = np.random.default_rng(0)
    latents, noise = (rng.standard_normal((3, 4, 8, 6)).astype(np.float32) for _ in range(2))
    sigma = np.array([0.0, 0.3, 1.0]) if batched else 0.3
    per_sample = np.broadcast_to(sigma, 3).reshape(3, 1, 1, 1)
    expected = latents + per_sample * (noise - latents)
    if kind == "torch":
        noisy = add_noise(torch.from_numpy(latents), torch.from_numpy(noise), sigma)
        assert noisy.dtype == torch.float32
        target = velocity(torch.from_numpy(latents), torch.from_numpy(noise)).numpy()
    else:
        noisy = add_noise(latents, noise, sigma)
        assert noisy.dtype == np.float32
        target = velocity(latents, noise)
    assert_allclose(np.asarray(noisy), expected, atol=1e-6)
    assert_allclose(target, noise - latents)


def test_a_sigma_tensor_of_another_precision_does_not_change_the_latents_type() -> None:
    latents = torch.zeros(2, 1, 2, 2, dtype=torch.bfloat16)
    noisy = add_noise(latents, torch.ones_like(latents), torch.tensor([0.25, 0.5], dtype=torch.float64))
    assert noisy.dtype == torch.bfloat16
    assert noisy[:, 0, 0, 0].tolist() == [0.25, 0.5]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"count": 0}, "number of sigmas: got 0"),
        ({"count": 3, "distribution": "cosine"}, "sigma distribution: got 'cosine', expected one of uniform"),
        ({"count": 3, "shift": 0.0}, "sigma shift: got 0.0"),
        ({"count": 3, "shift": float("nan")}, "sigma shift: got nan"),
    ],
)
def test_bad_settings_are_named(arguments: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        sample_sigmas(np.random.default_rng(0), **arguments)


def test_shapes_that_would_broadcast_are_refused() -> None:
    with pytest.raises(ValueError, match=r"noise: got shape \(1, 4\), expected \(2, 4\)"):
        velocity(np.zeros((2, 4)), np.zeros((1, 4)))
    with pytest.raises(ValueError, match="sigma: got shape"):
        add_noise(np.zeros((2, 4)), np.zeros((2, 4)), np.array([0.1, 0.2, 0.3]))
