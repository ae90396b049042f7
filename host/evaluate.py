"""Scores of pictures and their means with confidence intervals. Pure functions: features and numbers in, numbers out.

- Subject fidelity: mean cosine of a picture to all photos of the subject (DreamBooth, arXiv 2208.12242, section 4.2).
- Prompt fidelity: cosine of a picture and its prompt in CLIP's space (the same section).
- Drift: 1 - cosine of what base and adapter draw from the same noise for a prompt that does not name the subject.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from PIL import Image

from host.features import lite2_features

LEVEL = 0.95
RESAMPLES = 2000
CHUNK = 250
# 97.5 % points of Student's t with 1 to 30 degrees of freedom.
T_975 = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """A mean and its 95 % confidence interval."""

    mean: float
    """Mean over subjects of each subject's mean, so that every subject counts the same."""
    low: float
    high: float
    subjects: int
    pictures: int


def subject_fidelity(pictures: np.ndarray, photos: np.ndarray) -> np.ndarray:
    """Mean cosine of each picture to all photos.

    Args:
        pictures: (N, D) features, L2-normalised.
        photos: (M, D) of the same model.

    Returns:
        (N,).
    """
    return (pictures @ photos.T).mean(1)


def prompt_fidelity(pictures: np.ndarray, texts: np.ndarray) -> np.ndarray:
    """Cosine of each picture and its prompt, both (N, D) in the same space, L2-normalised; (N,)."""
    return (pictures * texts).sum(1)


def drift(base: np.ndarray, adapter: np.ndarray) -> np.ndarray:
    """1 - cosine of pictures from the same noise, both (N, D), L2-normalised; (N,). 0 where the adapter changed nothing."""
    return 1 - (base * adapter).sum(1)


def subject_similarity(pictures: Sequence[Image.Image], photos: Sequence[Image.Image]) -> np.ndarray:
    """Subject fidelity by EfficientNet-Lite2, (N,)."""
    return subject_fidelity(lite2_features(pictures), lite2_features(photos))


def picture_scores(pictures: np.ndarray, photos: np.ndarray, texts: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """All scores one feature model gives to the pictures of one subject.

    Args:
        pictures: (N, D) features, L2-normalised.
        photos: (M, D) of the subject's photos.
        texts: (N, D) of the pictures' prompts, where the model reads text.

    Returns:
        `subject` (N,) and, with texts, `prompt` (N,).
    """
    scores = {"subject": subject_fidelity(pictures, photos)}
    return scores if texts is None else scores | {"prompt": prompt_fidelity(pictures, texts)}


def summarise(
    values: Sequence[float], subjects: Sequence[str], *, resamples: int = RESAMPLES, seed: int = 0
) -> Summary:
    """Mean and 95 % interval of scores that come in groups, by the cluster bootstrap.

    Subjects are drawn with replacement, then of each as many pictures as it has, with replacement (Davison & Hinkley,
    Bootstrap Methods and their Application, 1997, section 3.8). The interval is the percentile interval of the means,
    taken further out because few subjects make it too short (Hesterberg, What Teachers Should Know About the Bootstrap,
    2015, section 4.1: expanded percentiles). With one subject its pictures alone are drawn, and the interval says nothing
    about other subjects.

    Args:
        values: (N,) scores, all finite.
        subjects: (N,) names of the subjects they belong to.
        resamples: Bootstrap samples.
        seed: Of the resampling; the same seed gives the same interval.

    Raises:
        ValueError: There are no scores, as many names as scores are missing, or a score is not finite.
    """
    groups = _groups(values, subjects)
    means = _resampled_means(groups, resamples, np.random.default_rng(seed))
    count = len(groups) if len(groups) > 1 else len(groups[0])
    low, high = np.quantile(means, [tail := _expanded_tail(count), 1 - tail])
    return Summary(
        mean=float(np.mean([group.mean() for group in groups])),
        low=float(low),
        high=float(high),
        subjects=len(groups),
        pictures=sum(map(len, groups)),
    )


def summarise_difference(
    adapter: Sequence[float],
    base: Sequence[float],
    subjects: Sequence[str],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Summary:
    """As `summarise`, of adapter - base: a pair shares prompt and noise and is resampled as one."""
    if len(adapter) != len(base):
        raise ValueError(f"got {len(adapter)} scores of the adapter and {len(base)} of the base, expected pairs")
    differences = np.asarray(adapter, np.float64) - np.asarray(base, np.float64)
    return summarise(differences.tolist(), subjects, resamples=resamples, seed=seed)


def summarise_pairs(
    rows: Sequence[Mapping[str, float]], subjects: Sequence[str], *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Summary]:
    """`base`, `adapter` and their `difference` over rows with these two scores."""
    base, adapter = ([row[kind] for row in rows] for kind in ("base", "adapter"))
    settings = {"resamples": resamples, "seed": seed}
    return {
        "base": summarise(base, subjects, **settings),
        "adapter": summarise(adapter, subjects, **settings),
        "difference": summarise_difference(adapter, base, subjects, **settings),
    }


def _groups(values: Sequence[float], subjects: Sequence[str]) -> list[np.ndarray]:
    if not len(values) or len(values) != len(subjects):
        raise ValueError(
            f"got {len(values)} scores and {len(subjects)} subjects, expected as many of both, at least one"
        )
    grouped: dict[str, list[float]] = {}
    for value, subject in zip(values, subjects, strict=True):
        grouped.setdefault(subject, []).append(value)
    if not np.isfinite(np.asarray(values, np.float64)).all():
        raise ValueError("scores: got NaN or infinity, expected finite numbers; leave out what was not measured")
    return [np.asarray(group, np.float64) for group in grouped.values()]


def _resampled_means(groups: Sequence[np.ndarray], resamples: int, rng: np.random.Generator) -> np.ndarray:
    """(resamples,) means; a chunk at a time, so that memory does not grow with the resamples."""
    sizes = np.array([len(group) for group in groups])
    padded = np.zeros((len(groups), sizes.max()))
    for row, group in zip(padded, groups, strict=True):
        row[: len(group)] = group
    parts = []
    for start in range(0, resamples, CHUNK):
        count = min(CHUNK, resamples - start)
        chosen = rng.integers(len(groups), size=(count, len(groups)))
        size = sizes[chosen][..., None]
        drawn = (rng.random((count, len(groups), sizes.max())) * size).astype(np.int64)
        inside = np.arange(sizes.max()) < size
        parts.append((padded[chosen[..., None], drawn] * inside).sum(2) / size[..., 0])
    return np.concatenate(parts).mean(1)


def _expanded_tail(count: int) -> float:
    """Share of the bootstrap means below the interval for `count` independent units: Phi(-t sqrt(n / (n - 1)))."""
    if count < 2:
        return (1 - LEVEL) / 2
    normal = NormalDist()
    z = normal.inv_cdf((1 + LEVEL) / 2)
    # Beyond the table the first term of the Cornish-Fisher expansion of t.
    t = T_975[count - 2] if count - 2 < len(T_975) else z + (z**3 + z) / (4 * (count - 1))
    return normal.cdf(-t * math.sqrt(count / (count - 1)))
