"""The noise schedule of flow matching: which timesteps the samples get, and how noise is added.

Reads arrays, writes arrays; nothing on disk. sigma is the share of noise, 0 for the clean picture, 1 for pure noise;
the transformers see `timestep = 1000 * sigma`.
Command: `pytest tests/host/test_schedule.py`.
"""

from statistics import NormalDist
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch

SigmaDistribution = Literal["uniform", "logit_normal"]
NUM_TRAIN_TIMESTEPS = 1000
SMALLEST_SIGMA = 2.0**-53  # half the gap below 1.0, so both ends of (0, 1) stay open after rounding

ArrayT = TypeVar("ArrayT", np.ndarray, torch.Tensor)
NumberT = TypeVar("NumberT", float, np.ndarray, torch.Tensor)


def sample_sigmas(
    rng: np.random.Generator, count: int, *, distribution: SigmaDistribution = "logit_normal", shift: float = 1.0
) -> np.ndarray:
    """Draws one sigma from each of `count` equally probable bins, in random order.

    Independent draws leave gaps in a pool of a few dozen samples, and a timestep without a sample is never trained.

    Args:
        rng: Source of randomness.
        count: Number of sigmas, at least 1.
        distribution: `uniform` on (0, 1), or `logit_normal`: the sigmoid of a standard normal (arXiv 2403.03206).
        shift: Moves the draws towards noise, see `shift_sigma`; 1 leaves them.

    Returns:
        sigmas: (count,) float64 in the open interval (0, 1).

    Raises:
        ValueError: If the count, the distribution or the shift is out of range.
    """
    if count < 1:
        raise ValueError(f"number of sigmas: got {count}, expected at least 1; ask for at least one sample")
    if distribution not in get_args(SigmaDistribution):
        expected = ", ".join(get_args(SigmaDistribution))
        raise ValueError(f"sigma distribution: got {distribution!r}, expected one of {expected}; choose one of them")
    quantiles = (rng.permutation(count) + rng.random(count)) / count
    sigmas = _inside_unit(quantiles)
    if distribution == "logit_normal":
        normal = NormalDist()
        sigmas = 1.0 / (1.0 + np.exp([-normal.inv_cdf(quantile) for quantile in sigmas]))
    return _inside_unit(shift_sigma(sigmas, shift))


def shift_sigma(sigma: NumberT, shift: float) -> NumberT:
    """Moves sigma towards noise, as larger pictures need: `shift * s / (1 + (shift - 1) * s)` (arXiv 2403.03206, eq. 23).

    Args:
        sigma: Number or array in [0, 1].
        shift: Positive; 1 leaves sigma as it is, 3 is common at 1024 px, below 1 moves towards the clean picture.

    Raises:
        ValueError: If the shift is not positive and finite.
    """
    if not 0 < shift < float("inf"):
        raise ValueError(f"sigma shift: got {shift}, expected a positive finite number; 1 means no shift")
    return shift * sigma / (1 + (shift - 1) * sigma)


def timestep(sigma: NumberT) -> NumberT:
    """The timestep that the transformer sees, from 0 to 1000: `1000 * sigma`."""
    return NUM_TRAIN_TIMESTEPS * sigma


def add_noise(latents: ArrayT, noise: ArrayT, sigma: Any) -> ArrayT:
    """The noisy latents on the straight path from picture to noise: `(1 - sigma) * x_0 + sigma * eps`.

    Args:
        latents: (C, H/f, W/f) or (B, C, H/f, W/f), x_0, VAE-scaled; f is the autoencoder's spatial factor.
        noise: Like `latents`, eps, standard normal.
        sigma: One number, or (B,) with one for each sample of the batch.

    Returns:
        Array like `latents`, of its dtype.

    Raises:
        ValueError: If the shapes do not fit.
    """
    _check_same_shape(latents, noise)
    if isinstance(latents, torch.Tensor):
        weight: Any = torch.as_tensor(sigma, dtype=latents.dtype, device=latents.device)
    else:
        weight = np.asarray(sigma, dtype=latents.dtype)
    if weight.ndim > 1 or (weight.ndim == 1 and (latents.ndim < 2 or len(weight) != len(latents))):
        raise ValueError(
            f"sigma: got shape {tuple(weight.shape)} for latents of shape {tuple(latents.shape)}, "
            "expected one number or one per sample of the batch; index the sigmas like the latents"
        )
    if weight.ndim == 1:
        weight = weight.reshape(-1, *[1] * (latents.ndim - 1))
    return (1 - weight) * latents + weight * noise


def velocity(latents: ArrayT, noise: ArrayT) -> ArrayT:
    """What the transformer must predict, the direction from picture to noise: `eps - x_0`, shaped like `latents`.

    Raises:
        ValueError: If the shapes differ.
    """
    _check_same_shape(latents, noise)
    return noise - latents


def _inside_unit(sigmas: np.ndarray) -> np.ndarray:
    return np.clip(sigmas, SMALLEST_SIGMA, 1 - SMALLEST_SIGMA)


def _check_same_shape(latents: ArrayT, noise: ArrayT) -> None:
    """Broadcasting would give every sample of a batch the same noise without a word."""
    if tuple(latents.shape) != tuple(noise.shape):
        raise ValueError(
            f"noise: got shape {tuple(noise.shape)}, expected {tuple(latents.shape)} like the latents; "
            "draw one noise value for each latent value"
        )
