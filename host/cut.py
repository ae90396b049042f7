"""Where an export's cut comes from: numbers, a share of the blocks, or a model's profile.

Reads `*.profile.json` of the user or of `block_profiles/`, which ship with the project.
Command: `pocketdit export PHOTOS -o BUNDLE --cut auto --skip 0.5`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from host.block_profile import SUFFIX, BlockProfile, Cut, read_profile
from host.plan import cut_of_share

SHIPPED_DIR = Path(__file__).parent / "block_profiles"
AUTO = "auto"
DEFAULT_SHARE = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class CutOrigin:
    """Where a cut came from, for a bundle's manifest."""

    profile: str
    """Name of a shipped profile, or its file."""
    source: str
    mode: str
    share: float
    margin: float | None
    same_share: float | None

    def __str__(self) -> str:
        clear = "" if self.margin is None else f", {self.margin:.1%} better than the next"
        stable = "" if self.same_share is None else f", the same in {self.same_share:.0%} of resamples"
        return f"profile {self.profile} ({self.source}, {self.mode}), {self.share:.0%} skipped{clear}{stable}"


@cache
def shipped_profiles() -> dict[str, BlockProfile]:
    """The profiles that come with the project, by name."""
    return {p.name.removesuffix(SUFFIX): read_profile(p) for p in sorted(SHIPPED_DIR.glob(f"*{SUFFIX}"))}


def find_profile(
    cut: str, model: str, architecture: Mapping[str, Any], transformer_sha256: Callable[[], str] | None
) -> tuple[str, BlockProfile]:
    """The profile that `auto` or `auto:FILE` means for a model, and its name.

    Args:
        cut: As the user gave it.
        model: As the user gave it.
        architecture: See `architecture_of`.
        transformer_sha256: Gives that of its weights, which takes a while; None where only the configuration is known, which
            then has to do.

    Raises:
        ValueError: The file's profile is of another model, or none is shipped for this one.
    """
    make = f"`pocketdit profile --model {model} --photos PHOTOS`"

    def fits(profile: BlockProfile) -> bool:
        if profile.architecture != architecture:
            return False
        known = profile.transformer_sha256
        return known is None or transformer_sha256 is None or known == transformer_sha256()

    if path := cut.removeprefix(AUTO).removeprefix(":"):
        profile = read_profile(Path(path))
        if not fits(profile):
            other = "other weights" if profile.architecture == architecture else f"{_described(profile.architecture)}"
            raise ValueError(
                f"{path} is the profile of another model: it was made for {profile.model} ({other}); {model} is "
                f"{_described(architecture)}. Make one with {make}."
            )
        return path, profile
    found = [(name, profile) for name, profile in shipped_profiles().items() if fits(profile)]
    if not found:
        names = ", ".join(f"{name} ({profile.source})" for name, profile in shipped_profiles().items())
        raise ValueError(
            f"cut: no profile of {model} ({_described(architecture)}) comes with PocketDiT; there are: {names}. Make one "
            f"with {make} and give --cut {AUTO}:FILE."
        )
    return max(found, key=lambda entry: entry[1].transformer_sha256 is not None)


def _described(architecture: Mapping[str, Any]) -> str:
    return ", ".join(str(value) if name == "class" else f"{name} {value}" for name, value in architecture.items())


def resolve_cut(
    cut: str | Cut | None,
    skip: float | None,
    *,
    model: str,
    architecture: Mapping[str, Any],
    transformer_sha256: Callable[[], str] | None,
    num_blocks: int,
) -> tuple[Cut, CutOrigin | None]:
    """The cut of an export's settings, and where it came from if from a profile.

    Args:
        cut: Numbers, `auto`, `auto:FILE`, or None: half of what is skipped at either end.
        skip: Share of the blocks; None is half, or without a profile a quarter at either end, rounded down.
        model: As the user gave it.
        architecture: See `architecture_of`.
        transformer_sha256: See `find_profile`.
        num_blocks: Of the model.

    Raises:
        ValueError: As `find_profile` and `BlockProfile.decide`.
    """
    if isinstance(cut, tuple):
        return cut, None
    if cut is None:
        return (num_blocks // 4, num_blocks // 4) if skip is None else cut_of_share(num_blocks, skip), None
    name, profile = find_profile(cut, model, architecture, transformer_sha256)
    share = DEFAULT_SHARE if skip is None else skip
    decision = profile.decide(share)
    return decision.cut, CutOrigin(
        profile=name,
        source=profile.source,
        mode=profile.mode,
        share=share,
        margin=decision.choice.margin if decision.choice else None,
        same_share=decision.stability.same_share if decision.stability else None,
    )
