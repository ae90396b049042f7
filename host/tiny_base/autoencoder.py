"""The embedded model's autoencoder: each 8 x 8 RGB block is projected on its 32 principal components.

A linear map, so that encoding costs nothing on a laptop; about 30 dB on the pictures of the tiny world.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Latents:
    """`latents`: (B, 32, H/8, W/8)."""

    latents: Tensor


@dataclass(frozen=True, slots=True)
class Pixels:
    """`sample`: (B, 3, H, W)."""

    sample: Tensor


class PCAAutoencoder(ModelMixin, ConfigMixin):
    """Principal components of 8 x 8 blocks, partly whitened: component i is divided by `scale[i]`."""

    config: Any

    @register_to_config
    def __init__(self, block_size: int = 8, latent_channels: int = 32, scaling_factor: float = 1.0) -> None:
        """Zero weights; `from_pretrained` or `fit` fills them."""
        super().__init__()
        width = 3 * block_size**2
        self.mean = nn.Parameter(torch.zeros(width))
        self.components = nn.Parameter(torch.zeros(latent_channels, width))
        self.scale = nn.Parameter(torch.ones(latent_channels))

    def encode(self, pixels: Tensor) -> Latents:
        """Pixels (B, 3, H, W) in [-1, 1], H and W multiples of 8, to latents of about unit variance."""
        size = self.config.block_size
        blocks = F.unfold(pixels, size, stride=size).transpose(1, 2)
        latents = (blocks - self.mean) @ self.components.T / self.scale
        return Latents(latents.transpose(1, 2).unflatten(2, (pixels.shape[2] // size, pixels.shape[3] // size)))

    def decode(self, latents: Tensor) -> Pixels:
        """The inverse: (B, 32, h, w) to (B, 3, 8h, 8w), not clamped."""
        size = self.config.block_size
        blocks = latents.flatten(2).transpose(1, 2) * self.scale @ self.components + self.mean
        output_size = (latents.shape[2] * size, latents.shape[3] * size)
        return Pixels(F.fold(blocks.transpose(1, 2), output_size, size, stride=size))

    @torch.no_grad()
    def fit(self, pixels: Tensor) -> None:
        """Computes the components from pictures (N, 3, H, W); scale_i = sqrt(sd_i sd_0), then unit variance overall."""
        size = self.config.block_size
        blocks = F.unfold(pixels, size, stride=size).transpose(1, 2).flatten(0, 1)
        self.mean.copy_(blocks.mean(0))
        # eigh of the covariance: 192 x 192, whatever the number of blocks.
        values, vectors = torch.linalg.eigh(torch.cov((blocks - self.mean).T))
        order = values.argsort(descending=True)[: self.config.latent_channels]
        self.components.copy_(vectors[:, order].T)
        deviation = values[order].clamp_min(1e-6).sqrt()
        self.scale.copy_((deviation * deviation[0]).sqrt())
        self.scale.mul_(self.encode(pixels).latents.std())
