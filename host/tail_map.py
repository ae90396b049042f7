"""A tail that answers: a low-rank linear map from the change of the tail's input to the change of its residual.

The stored tail residual is the frozen base's answer to the base's own middle. As LoRA moves the middle's output by dh, the
residual moves too; this map, one per band of noise levels, predicts by how much: dr = dh down up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TailMap:
    """One map per band of noise levels.

    Attributes:
        edges: (K - 1,) noise levels between the bands, rising.
        down: (K, D, R).
        up: (K, R, D).
    """

    edges: Tensor
    down: Tensor
    up: Tensor

    def answer(self, change: Tensor, sigmas: Tensor) -> Tensor:
        """Predicted change of the tail's residual (B, S, D).

        Args:
            change: (B, S, D) of the tail's input, from what it was when the residual was stored.
            sigmas: (B,) noise levels.
        """
        band = torch.bucketize(sigmas.contiguous(), self.edges)
        return change @ self.down[band] @ self.up[band]

    def save(self, path: Path) -> None:
        """Writes one safetensors file."""
        save_file({"edges": self.edges, "down": self.down.contiguous(), "up": self.up.contiguous()}, path)

    @classmethod
    def load(cls, path: Path) -> "TailMap":
        """Reads what `save` wrote."""
        return cls(**load_file(path))

    def explained(self, change: Tensor, response: Tensor, sigmas: Tensor) -> float:
        """Share of the squared change of the residual (B, S, D) that the map predicts; 0 is a constant residual's."""
        left = (response - self.answer(change, sigmas)).square().sum()
        return float(1 - left / response.square().sum())


def fit(change: Tensor, response: Tensor, sigmas: Tensor, *, rank: int, bands: int, ridge: float = 1e-3) -> TailMap:
    """Fits the maps by reduced-rank ridge regression (Izenman 1975): the best map of that rank for these pairs.

    Args:
        change: (N, S, D) of the tail's input.
        response: (N, S, D) of its residual.
        sigmas: (N,) noise levels.
        rank: R.
        bands: K; each gets as many samples.
        ridge: Penalty, relative to the mean squared change.

    Raises:
        ValueError: Fewer samples than bands, or a rank above the width.
    """
    width = change.shape[-1]
    if not 1 <= rank <= width or not 1 <= bands <= len(sigmas):
        raise ValueError(
            f"tail map: got rank {rank} and {bands} bands for {len(sigmas)} samples of width {width}; expected a rank of 1 "
            "to the width and at most as many bands as samples."
        )
    edges = torch.quantile(sigmas, torch.linspace(0, 1, bands + 1)[1:-1]) if bands > 1 else torch.empty(0)
    band = torch.bucketize(sigmas.contiguous(), edges)
    maps = [
        _fit_band(change[band == k].flatten(0, 1), response[band == k].flatten(0, 1), rank, ridge) for k in range(bands)
    ]
    return TailMap(edges, torch.stack([down for down, _ in maps]), torch.stack([up for _, up in maps]))


def _fit_band(x_ND: Tensor, y_ND: Tensor, rank: int, ridge: float) -> tuple[Tensor, Tensor]:
    x_ND, y_ND = x_ND.double(), y_ND.double()
    gram_DD = x_ND.T @ x_ND
    penalty = ridge * gram_DD.diagonal().mean().clamp_min(1e-30)
    full_DD = torch.linalg.solve(gram_DD + penalty * torch.eye(len(gram_DD), dtype=gram_DD.dtype), x_ND.T @ y_ND)
    # The principal directions of what the full map predicts.
    _, _, directions = torch.linalg.svd(_factor(gram_DD) @ full_DD, full_matrices=False)
    up_RD = directions[:rank]
    return (full_DD @ up_RD.T).float(), up_RD.float()


def _factor(gram_DD: Tensor) -> Tensor:
    """L with Lᵀ L = gram, so that L A has the singular vectors of X A."""
    values, vectors = torch.linalg.eigh(gram_DD)
    return values.clamp_min(0).sqrt()[:, None] * vectors.T


def changes(states: Sequence[tuple[Tensor, Tensor]], base: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Changes of the tail's input and of its residual, of several trained models after one another.

    Args:
        states: States (N, S, D) before and behind the tail, of each model.
        base: The frozen base's.
    """
    inputs = torch.cat([before - base[0] for before, _ in states])
    residuals = torch.cat([(behind - before) - (base[1] - base[0]) for before, behind in states])
    return inputs, residuals
