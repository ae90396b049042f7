"""The TOML form of a phone: what a profile has to say, and everything that can be wrong with it, said at once.

Reads the text of `profiles/<name>.toml` or of a user's own file. Writes nothing. `device.py` turns it into a `Device`.
"""

import dataclasses
import itertools
import math
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from runtime.errors import SchemaError
from runtime.schema import decode

Kind = Literal["published", "measured", "estimated"]
"""Published by a vendor, the press or a public source tree; measured by somebody; estimated by us, with the reasoning."""
Cluster = Literal["big", "mid", "little"]

RANGES: dict[str, tuple[float, float]] = {
    "memory.ram_gib": (0.5, 64),
    "memory.private_budget_mib": (16, 32 * 1024),
    "memory.page_cache_mib": (16, 32 * 1024),
    "memory.zram_mib": (0, 32 * 1024),
    "compute.usable_gflops": (0.1, 10_000),
    "compute.sustained_gflops": (0.1, 10_000),
    "cores.count": (1, 16),
    "cores.clock_ghz": (0.2, 6),
    "cores.flops_per_cycle": (1, 128),
    "flash.read_mb_per_s": (5, 20_000),
    "flash.write_mb_per_s": (2, 20_000),
    "flash.sustained_write_mb_per_s": (1, 20_000),
    "flash.random_read_iops": (500, 2_000_000),
    "flash.random_write_iops": (100, 2_000_000),
    "flash.queue_depth": (1, 64),
}
"""What a phone can be. A value outside is most often one in another unit."""
UNIT_WORDS = "gib|gb|mib|mb|kib|kb|bytes|ghz|mhz|hz|tflops|gflops|mflops|iops|us|ms|s|per|seconds|minutes|share"
CITATION = re.compile(r"\[([\w-]+)\]")
"""In a source: the name of an entry of `[sources]`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sourced:
    """A value of any kind; without kind and source it cannot be read."""

    kind: Kind
    source: str
    """URL, `[name]` of an entry of `[sources]`, or the reasoning."""

    def __post_init__(self) -> None:
        if not self.source.strip():
            raise ValueError("source: got an empty text, expected a URL or the reasoning")


@dataclass(frozen=True, kw_only=True, slots=True)
class Number(Sourced):
    """One number."""

    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Range(Sourced):
    """Low and high."""

    value: tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve(Sourced):
    """Points (x, y)."""

    value: tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Text(Sourced):
    """A word or a sentence."""

    value: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag(Sourced):
    """Yes or no."""

    value: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryTable:
    """`[memory]`."""

    ram_gib: Number
    private_budget_mib: Number
    """Anonymous memory a foreground app may hold before the low-memory killer turns to it."""
    page_cache_mib: Number
    """Pages of the app's own files that stay in memory beside that."""
    zram_mib: Number | None = None
    """Compressed swap."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeTable:
    """`[compute]`."""

    usable_gflops: Range
    """fp32, what a product reaches on all fast cores."""
    sustained_gflops: Range
    """The same when the phone is hot."""
    thermal_seconds_share: Curve
    """Points (seconds under full load, share of full speed)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CoresTable:
    """One `[[cores]]`: equal cores."""

    name: Text
    cluster: Cluster
    count: Number
    clock_ghz: Number
    flops_per_cycle: Number
    """fp32, one core."""
    usable_screen_off: Flag


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashTable:
    """`[flash]`; decimal megabytes, as vendors count."""

    type: Text
    read_mb_per_s: Number
    write_mb_per_s: Number
    """In a burst."""
    sustained_write_mb_per_s: Number
    """Once the burst is spent."""
    random_read_iops: Number
    """4 KiB."""
    random_write_iops: Number
    queue_depth: Number
    """Requests under way at once when the IOPS were measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileFile:
    """The whole file."""

    name: str
    title: str
    sources: dict[str, str] = field(default_factory=dict)
    """Long sources by a short name."""
    memory: MemoryTable
    compute: ComputeTable
    cores: tuple[CoresTable, ...]
    flash: FlashTable
    low_memory_killer: tuple[Text, ...] = ()
    """What is known of when this phone kills."""


def parse_profile(text: str, where: str) -> ProfileFile:
    """Reads the text of a profile.

    Args:
        text: TOML.
        where: Name of the source, used in messages.

    Raises:
        SchemaError: It is not TOML, or lacks facts, has unknown keys, wrong units or impossible values; all are named.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SchemaError(f"{where}: not TOML: {error}") from None
    # These run on what was read, so that a file that does not decode gets its whole list too.
    faults = [*_wrong_units(data), *_implausible(data), *_bad_sources(data)]
    try:
        profile = decode(ProfileFile, data, where)
        faults += _contradictions(profile)
    except SchemaError as error:
        faults.insert(0, str(error).removeprefix(f"{where}: "))
    if faults:
        raise SchemaError(f"{where}: " + "; ".join(faults))
    return profile


def _tables(data: dict[str, Any]) -> Iterator[tuple[str, type, dict[str, Any]]]:
    """(path for messages, dataclass, table) of the tables that hold facts."""
    for name, cls in (("memory", MemoryTable), ("compute", ComputeTable), ("flash", FlashTable)):
        if isinstance(data.get(name), dict):
            yield name, cls, data[name]
    cores = data.get("cores")
    for index, each in enumerate(cores if isinstance(cores, list) else []):
        if isinstance(each, dict):
            yield f"cores[{index}]", CoresTable, each


def _wrong_units(data: dict[str, Any]) -> list[str]:
    def stem(key: str) -> str:
        return re.sub(rf"(_({UNIT_WORDS}))+$", "", key)

    faults = []
    for path, cls, table in _tables(data):
        known = [each.name for each in dataclasses.fields(cls)]
        for key in table:
            right = next((each for each in known if stem(each) == stem(key)), key)
            if key not in known and right != key:
                faults.append(f"{path}.{key}: wrong unit, expected {path}.{right}")
    return faults


def _implausible(data: dict[str, Any]) -> list[str]:
    faults = []
    for path, _, table in _tables(data):
        for key, fact in table.items():
            low, high = RANGES.get(f"{path.partition('[')[0]}.{key}", (-math.inf, math.inf))
            value = fact.get("value") if isinstance(fact, dict) else None
            for number in value if isinstance(value, list) else [value]:
                if isinstance(number, int | float) and not low <= number <= high:
                    faults.append(f"{path}.{key}: got {number:g}, expected {low:g} to {high:g}; is it in another unit?")
    return faults


def _bad_sources(data: dict[str, Any]) -> list[str]:
    """Each citation has to exist in `[sources]`, each entry there to be cited."""
    sources = data.get("sources")
    names = set(sources) if isinstance(sources, dict) else set()
    cited: set[str] = set()

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            if isinstance(value.get("source"), str):
                cited.update(CITATION.findall(value["source"]))
            value = list(value.values())
        for each in value if isinstance(value, list) else []:
            walk(each)

    walk({key: value for key, value in data.items() if key != "sources"})
    faults = [f"source [{name}] is not in [sources]" for name in sorted(cited - names)]
    return faults + [f"sources.{name}: no fact cites it" for name in sorted(names - cited)]


def _contradictions(profile: ProfileFile) -> list[str]:
    memory, compute, flash = profile.memory, profile.compute, profile.flash
    faults = []
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", profile.name):
        faults.append(f"name: got {profile.name!r}, expected small letters, digits and hyphens")
    if not profile.cores:
        faults.append("cores: got none, expected at least one [[cores]] table")
    for index, each in enumerate(profile.cores):
        if each.count.value % 1:
            faults.append(f"cores[{index}].count: got {each.count.value:g}, expected a whole number")
    held_mib = memory.private_budget_mib.value + memory.page_cache_mib.value
    if held_mib > memory.ram_gib.value * 1024:
        faults.append(f"memory: private_budget_mib and page_cache_mib make {held_mib:g} MiB, more than ram_gib")
    for name in ("usable_gflops", "sustained_gflops"):
        low, high = getattr(compute, name).value
        if low > high:
            faults.append(f"compute.{name}: got {low:g} to {high:g}, expected the smaller first")
    if any(hot > cold for hot, cold in zip(compute.sustained_gflops.value, compute.usable_gflops.value, strict=True)):
        faults.append("compute.sustained_gflops: more than usable_gflops")
    points = compute.thermal_seconds_share.value
    seconds, shares = [point[0] for point in points], [point[1] for point in points]
    if seconds[:1] != [0] or any(not a < b < math.inf for a, b in itertools.pairwise(seconds)):
        faults.append(
            "compute.thermal_seconds_share: expected points [seconds, share] from 0 seconds on, later ones later"
        )
    if not all(0 < share <= 1 for share in shares):
        faults.append("compute.thermal_seconds_share: expected shares above 0 and up to 1")
    if flash.sustained_write_mb_per_s.value > flash.write_mb_per_s.value:
        faults.append("flash.sustained_write_mb_per_s: more than write_mb_per_s")
    return faults
