"""Which blocks a model can do without: what masking the prompt there does to its pictures, and the cut that follows.

Reads and writes `<model>.profile.json`, made by host/block_selection.py and read by host/cut.py.
Command: `pocketdit profile --photos PHOTOS`.

The selection is that of DiT-BlockSkip (arXiv 2603.20755): with the attention of image tokens to prompt tokens masked in the
first n blocks, or in the last m, k = n + m blocks are skipped where the pictures change least,

    (n*, m*) = argmin over n + m = k of sum_j D(x_j, x_j with the first n masked) + D(x_j, x_j with the last m masked)

with D = 1 - cosine of image features and j over subjects, prompts and seeds. Both sums are curves over the number of
blocks, so 2 (B - 1) sets of pictures answer every k below B.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from host.plan import skipped_of_share
from runtime import atomic
from runtime.errors import SchemaError
from runtime.schema import decode, encode

SCHEMA = "pocketdit.profile/1"
SUFFIX = ".profile.json"
SHARES = (0.3, 0.4, 0.5)
"""The shares of the paper, which a profile has decided."""
THIS = "this profile"
RESAMPLES = 2000
DECIMALS = 6
ARCHITECTURE = ("num_layers", "num_single_layers", "num_attention_heads", "attention_head_dim")
"""Entries of a transformer's configuration that say how many blocks it has, and how wide they are."""

Cut = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Curves:
    """What masking did to one picture: 1 - cosine of its image features to those of the unmasked one from the same noise."""

    subject: str
    prompt: str
    seed: int
    first: tuple[float, ...]
    """With the first n blocks masked, n from 0."""
    last: tuple[float, ...]
    """With the last m blocks masked, m from 0."""
    single: tuple[float, ...] = ()
    """With one block masked, by its number."""
    window: tuple[float, ...] = ()
    """With `BlockProfile.window` blocks masked, by the number of their first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The best of all ways to skip k blocks."""

    cut: Cut
    """Blocks at the head and at the tail."""
    cost: float
    """Its mean change of the pictures, head and tail added: 0 to 4."""
    runner_up: Cut | None
    """The second best; None if there is but one way."""
    margin: float | None
    """Share by which the best costs less than that, 0 to 1: how clear the decision is."""
    even_cost: float
    """What half at either end costs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stability:
    """What other pictures would have decided."""

    without_subject: dict[str, Cut]
    """The cut without the pictures of this subject; empty where there is but one."""
    with_seed: dict[str, Cut]
    """The cut by the pictures of this seed alone."""
    same_share: float
    """Share of bootstrap resamples, of subjects and then of their pictures, that give the same cut."""
    near_share: float
    """Share that gives this cut or one a block away."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The cut for a share of the blocks. A cut from the paper has no more than that."""

    share: float
    cut: Cut
    choice: Choice | None = None
    stability: Stability | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareAgreement:
    """Whether masking the base decides as masking the fine-tuned model does."""

    share: float
    full: Cut
    quick: Cut
    excess: float | None
    """How much more the quick cut costs by the full procedure's curves, 0.1 is a tenth; None where the best costs nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """The quick procedure against the full one."""

    against: str
    """The full one: `this profile`, with the same prompts and seeds, or the name of a shipped one."""
    first: float | None
    """Spearman's rank correlation of the curves over the first n blocks; None where one does not change."""
    last: float | None
    """The same over the last m."""
    cuts: tuple[ShareAgreement, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What the selection took, cached parts included."""

    subjects: int
    pictures: int
    fine_tuning_s: float
    drawing_s: float
    features_s: float
    quick_pictures: int = 0
    """Pictures of the base, drawn for the agreement alone."""
    quick_s: float = 0.0
    """What those took, features included."""

    @property
    def total_s(self) -> float:
        """Without the agreement."""
        return self.fine_tuning_s + self.drawing_s + self.features_s


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockProfile:
    """What is known of a model's blocks."""

    schema: str = SCHEMA
    created_by: str
    source: Literal["measured", "paper"]
    mode: Literal["full", "quick"]
    """`full` masks the model fine-tuned on each subject, `quick` the base."""
    model: str
    """As the user gave it."""
    architecture: dict[str, Any]
    """See `ARCHITECTURE`."""
    transformer_sha256: str | None = None
    """Of the weights it was measured on; None fits every model of this architecture."""
    num_blocks: int
    features: str | None = None
    """The image features compared."""
    window: int = 3
    """Blocks of the sliding window."""
    cuts: tuple[Decision, ...]
    agreement: Agreement | None = None
    cost: Cost | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    """What the pictures were made with, for the record."""
    note: str = ""
    pictures: tuple[Curves, ...] = ()
    quick_pictures: tuple[Curves, ...] = ()
    """Of the base, in a full profile."""

    def __post_init__(self) -> None:
        for curves in (*self.pictures, *self.quick_pictures):
            for name, length in (("first", self.num_blocks), ("last", self.num_blocks)):
                if len(getattr(curves, name)) != length:
                    raise ValueError(f"{name}: got {len(getattr(curves, name))} values, expected {length}, one a block")
            for name, length in (("single", self.num_blocks), ("window", self.num_blocks - self.window + 1)):
                if len(getattr(curves, name)) not in (0, length):
                    raise ValueError(f"{name}: got {len(getattr(curves, name))} values, expected {length} or none")
        if self.source == "measured" and not self.pictures:
            raise ValueError("pictures: got none, expected those that were measured")
        for decision in self.cuts:
            if min(decision.cut) < 0 or sum(decision.cut) >= self.num_blocks:
                raise ValueError(f"cut: got {decision.cut} of {self.num_blocks} blocks, expected at least one left")

    def decide(self, share: float) -> Decision:
        """The cut for a share of the blocks, from the curves, or where there are none as the profile states it.

        Raises:
            ValueError: The share is below 0 or not below 1, or there are no curves and no cut for it.
        """
        skipped = skipped_of_share(self.num_blocks, share)
        if self.pictures:
            return decide(self.pictures, skipped, share)
        for decision in self.cuts:
            if sum(decision.cut) == skipped:
                return decision
        known = ", ".join(f"{decision.share:g}" for decision in self.cuts)
        raise ValueError(
            f"skip: got {share:g}, {skipped} of {self.num_blocks} blocks, but the profile of {self.model} ({self.source}) has "
            f"cuts for {known} only. Take one of these, or give --cut N,M."
        )


def choose_cut(first: Sequence[float], last: Sequence[float], k: int) -> Choice:
    """The cheapest way to skip k blocks; of equal ones that nearest the middle, then the larger head.

    Args:
        first: Cost of the first n blocks, n from 0.
        last: Cost of the last m blocks, m from 0.
        k: Blocks to skip.

    Raises:
        ValueError: The curves are not long enough for k.
    """
    cuts = _ways(len(first), len(last), k)
    costs = np.round([first[n] + last[m] for n, m in cuts], 12)
    order = np.argsort(costs, kind="stable")
    best, second = order[0], order[1] if len(order) > 1 else None
    margin = None
    if second is not None:
        margin = float(1 - costs[best] / costs[second]) if costs[second] > 0 else 0.0
    return Choice(
        cut=cuts[best],
        cost=round(float(costs[best]), DECIMALS),
        runner_up=None if second is None else cuts[second],
        margin=None if margin is None else round(margin, DECIMALS),
        even_cost=round(float(costs[0]), DECIMALS),
    )


def _ways(num_first: int, num_last: int, k: int) -> list[Cut]:
    """All n + m = k, from the middle outwards."""
    ways = [(n, k - n) for n in range(k + 1) if n < num_first and k - n < num_last]
    if k < 0 or not ways:
        raise ValueError(f"k: got {k}, expected 0 to {num_first + num_last - 2}, blocks the curves know")
    return sorted(ways, key=lambda cut: (abs(cut[0] - cut[1]), -cut[0]))


def decide(pictures: Sequence[Curves], k: int, share: float) -> Decision:
    """The cut for k blocks by all pictures, and what parts and resamples of them decide."""

    def cut_of(chosen: Iterable[Curves]) -> Cut:
        return choose_cut(*mean_curves(list(chosen)), k).cut

    choice = choose_cut(*mean_curves(pictures), k)
    subjects, seeds = ({getattr(p, name): None for p in pictures} for name in ("subject", "seed"))
    cuts, shares = _resampled(pictures, k)
    near = [abs(cut[0] - choice.cut[0]) <= 1 for cut in cuts]
    return Decision(
        share=share,
        cut=choice.cut,
        choice=choice,
        stability=Stability(
            without_subject={
                name: cut_of(p for p in pictures if p.subject != name) for name in subjects if len(subjects) > 1
            },
            with_seed={str(seed): cut_of(p for p in pictures if p.seed == seed) for seed in seeds},
            same_share=round(float(shares[cuts.index(choice.cut)]), 4),
            near_share=round(float(shares[near].sum()), 4),
        ),
    )


def mean_curves(pictures: Sequence[Curves]) -> tuple[list[float], list[float]]:
    """Costs of the first n and of the last m blocks, means over the pictures."""
    first, last = (np.array([getattr(p, name) for p in pictures]).mean(0).tolist() for name in ("first", "last"))
    return first, last


def _resampled(pictures: Sequence[Curves], k: int) -> tuple[list[Cut], np.ndarray]:
    """Every cut of k blocks, and the share of bootstrap resamples that choose it.

    Subjects are drawn with replacement, then of each as many pictures as it has; with one subject its pictures alone.
    """
    names = [p.subject for p in pictures]
    groups = [np.flatnonzero([each == name for each in names]) for name in dict.fromkeys(names)]
    rng, counts = np.random.default_rng(0), np.zeros((RESAMPLES, len(pictures)))
    for row in counts:
        for number in rng.integers(len(groups), size=len(groups)):
            np.add.at(row, rng.choice(groups[number], len(groups[number])), 1)
    weights = counts / counts.sum(1, keepdims=True)
    first, last = (weights @ np.array([getattr(p, name) for p in pictures]) for name in ("first", "last"))
    cuts = _ways(first.shape[1], last.shape[1], k)
    costs = np.round(np.stack([first[:, n] + last[:, m] for n, m in cuts], 1), 12)
    return cuts, np.bincount(costs.argmin(1), minlength=len(cuts)) / RESAMPLES


def agreement(
    full: Sequence[Curves], quick: Sequence[Curves], against: str = THIS, shares: Sequence[float] = SHARES
) -> Agreement:
    """Compares the curves of the base with those of the fine-tuned model."""
    full_curves, quick_curves = mean_curves(full), mean_curves(quick)
    cuts = []
    for share in shares:
        k = skipped_of_share(len(full_curves[0]), share)
        best, other = choose_cut(*full_curves, k), choose_cut(*quick_curves, k)
        cost = full_curves[0][other.cut[0]] + full_curves[1][other.cut[1]]
        excess = round(max(cost / best.cost - 1, 0), 4) if best.cost else None
        cuts.append(ShareAgreement(share=share, full=best.cut, quick=other.cut, excess=excess))
    first, last = (rank_correlation(a, b) for a, b in zip(full_curves, quick_curves, strict=True))
    return Agreement(against=against, first=first, last=last, cuts=tuple(cuts))


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's, equal values sharing their mean rank; None where one of them is constant."""
    ranks = []
    for values in (a, b):
        _, index, counts = np.unique(np.round(values, 12), return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[index])
    if any(np.ptp(rank) == 0 for rank in ranks):
        return None
    return round(float(np.corrcoef(ranks[0], ranks[1])[0, 1]), 4)


def architecture_of(transformer: Any) -> dict[str, Any]:
    """Class, number and width of the blocks of one of diffusers' transformers, on the meta device or not."""
    values = {name: transformer.config.get(name) for name in ARCHITECTURE}
    return {"class": type(transformer).__name__} | {name: value for name, value in values.items() if value is not None}


def table(profile: BlockProfile, shares: Iterable[float] = SHARES) -> str:
    """Aligned text, a line for each share."""
    head = "skip|blocks|cut|cost|half each|next best|by|same in resamples|without a subject|by a seed alone"
    rows = [head.split("|"), *(_row(profile.decide(share)) for share in sorted(set(shares)))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(lines)


def _row(decision: Decision) -> list[str]:
    cells, choice, stability = [f"{decision.share:.0%}"], decision.choice, decision.stability
    cells += [str(sum(decision.cut)), cut_text(decision.cut)]
    if choice is None or stability is None:
        return cells + ["-"] * 7
    cells += [f"{choice.cost:.3f}", f"{choice.even_cost:.3f}"]
    cells += ["-", "-"] if choice.runner_up is None else [cut_text(choice.runner_up), f"{choice.margin:.1%}"]
    cells += [f"{stability.same_share:.0%}"]
    return cells + [counted(decision.cut, cuts) for cuts in (stability.without_subject, stability.with_seed)]


def cut_text(cut: Cut) -> str:
    """As `--cut` takes it."""
    return f"{cut[0]},{cut[1]}"


def counted(cut: Cut, others: Mapping[str, Cut]) -> str:
    """How many of the others are the same cut, and the ones that are not."""
    if not others:
        return "-"
    different = dict.fromkeys(cut_text(other) for other in others.values() if other != cut)
    same = f"{sum(other == cut for other in others.values())} of {len(others)}"
    return same + (f" ({' '.join(different)})" if different else "")


def agreement_text(found: Agreement) -> str:
    """The agreement in a sentence."""
    ranks = (
        f"{name} {'-' if value is None else f'{value:.2f}'}"
        for name, value in (("first", found.first), ("last", found.last))
    )
    cuts = (
        f"{each.share:.0%} {cut_text(each.full)}, quick {cut_text(each.quick)}"
        + (f" (+{each.excess:.1%})" if each.excess else "")
        for each in found.cuts
    )
    return f"quick against full ({found.against}): rank correlation {', '.join(ranks)}; {'; '.join(cuts)}"


def write_profile(profile: BlockProfile, path: Path) -> None:
    """Writes the JSON, a line for each entry and for each picture."""

    def text(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)

    def lines(value: Any) -> str:
        rows = isinstance(value, list) and value and isinstance(value[0], dict)
        return "[\n    " + ",\n    ".join(map(text, value)) + "\n  ]" if rows else text(value)

    entries = (f"  {text(name)}: {lines(value)}" for name, value in encode(profile).items())
    atomic.write_bytes(path, ("{\n" + ",\n".join(entries) + "\n}\n").encode())


def read_profile(path: Path) -> BlockProfile:
    """Reads and checks a profile.

    Raises:
        SchemaError: It cannot be read, is of another schema, or has unknown keys or unfit values; all are named.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SchemaError(f"{path} cannot be read as a profile ({error}). Make one with `pocketdit profile`.") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        got = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise SchemaError(f"{path}: schema: got {got!r}, expected {SCHEMA!r}. Make one with `pocketdit profile`.")
    return decode(BlockProfile, data, str(path))
