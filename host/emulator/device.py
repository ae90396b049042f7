"""A phone as the emulator sees it: what an app may hold, cores, flash, heat; every fact with its kind and source.

Reads `profiles/<name>.toml` or a user's own file of that form, see profile_file.py. Writes nothing.
Command: `pocketdit emulate BUNDLE --device pixel-8`, or `--device my-phone.toml`.
"""

import dataclasses
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from host.emulator.profile_file import CITATION, Cluster, Kind, ProfileFile, Sourced, parse_profile
from host.emulator.projection import thermal_share
from runtime.memory import MIB
from runtime.schema import encode

GIB, MB = 1024 * MIB, 1_000_000
PROFILES = resources.files("host.emulator") / "profiles"
UNITS = {
    "_gib": "GiB",
    "_mib": "MiB",
    "_ghz": "GHz",
    "_gflops": "GFLOP/s",
    "_mb_per_s": "MB/s",
    "_iops": "IOPS",
    "_us": "µs",
}
"""Ends of key names and the unit each stands for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Core:
    """Equal cores of one cluster."""

    count: int
    name: str
    ghz: float
    flops_per_cycle: float
    """fp32, one core."""
    cluster: Cluster
    usable_screen_off: bool
    """Whether Android schedules a foreground service there while the screen is off."""

    @property
    def peak_gflops(self) -> float:
        """All of them at their highest clock; no product reaches it."""
        return self.count * self.ghz * self.flops_per_cycle


@dataclass(frozen=True, kw_only=True, slots=True)
class Flash:
    """The storage that weights are read from."""

    kind: str
    """Class, e.g. `UFS 3.1`."""
    read_bytes_per_s: float
    write_bytes_per_s: float
    """In a burst."""
    sustained_write_bytes_per_s: float
    """Once the burst is spent."""
    latency_us: float
    """One 4 KiB read: the queue depth of the IOPS over the IOPS."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """One line of a profile, for people: what it says, and why one may believe it."""

    key: str
    """Path in the TOML file."""
    text: str
    """Value with its unit."""
    kind: Kind
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A phone, in bytes, seconds and GFLOP/s."""

    name: str
    title: str
    ram_bytes: int
    private_budget_bytes: int
    """Anonymous memory a foreground app may hold before the low-memory killer turns to it."""
    page_cache_bytes: int
    """Pages of the app's own files that stay in memory beside that."""
    zram_bytes: int | None
    """Compressed swap; None is not known. The emulator gives no swap: stricter than the phone."""
    cores: tuple[Core, ...]
    usable_gflops: tuple[float, float]
    """Least and most an fp32 product of a training step reaches on all fast cores."""
    sustained_gflops: tuple[float, float]
    """The same when the phone is hot."""
    thermal: tuple[tuple[float, float], ...]
    """(seconds under full load, share of full speed); linear between the points, flat after the last."""
    flash: Flash
    facts: tuple[Fact, ...]

    @property
    def screen_off_share(self) -> float:
        """Share of the peak of all cores that is left while the screen is off."""
        left = sum(core.peak_gflops for core in self.cores if core.usable_screen_off)
        return left / sum(core.peak_gflops for core in self.cores)

    def speed_share(self, seconds: float) -> float:
        """Share of full speed after that long under full load."""
        return thermal_share(self.thermal, seconds)

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON can hold it."""
        values: dict[str, Any] = encode(self)
        return values


def known_devices() -> tuple[str, ...]:
    """Names of the shipped profiles, in order."""
    paths = (Path(entry.name) for entry in PROFILES.iterdir())
    return tuple(sorted(path.stem for path in paths if path.suffix == ".toml"))


def load_device(name_or_path: str | Path) -> Device:
    """Reads a shipped profile by its name, or a user's own TOML file by its path.

    Raises:
        ValueError: There is no such profile or file; the message lists the known names.
        SchemaError: The file is not TOML, lacks facts, or has unknown keys, wrong units or impossible values; all are named.
    """
    text = str(name_or_path)
    known = f"Known devices: {', '.join(known_devices())}; or give the path of a .toml file of your own."
    if text in known_devices():
        return _device(parse_profile((PROFILES / f"{text}.toml").read_text(encoding="utf-8"), text))
    if not (isinstance(name_or_path, Path) or text.endswith(".toml") or "/" in text):
        near = difflib.get_close_matches(text.lower().replace(" ", "-"), known_devices(), 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(f"device: got {text!r}, which is no known device.{hint} {known}")
    try:
        content = Path(text).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"device: {text} cannot be read ({error}). {known}") from None
    return _device(parse_profile(content, text))


def _device(profile: ProfileFile) -> Device:
    memory, compute, flash = profile.memory, profile.compute, profile.flash
    latency_us = 1e6 * flash.queue_depth.value / flash.random_read_iops.value
    latency = Fact(
        key="flash.latency_us",
        text=f"{latency_us:.0f} µs",
        kind="estimated",
        source="queue_depth over random_read_iops: with that many requests under way each waits so long",
    )
    cores = tuple(
        Core(
            count=int(each.count.value),
            name=each.name.value,
            ghz=each.clock_ghz.value,
            flops_per_cycle=each.flops_per_cycle.value,
            cluster=each.cluster,
            usable_screen_off=each.usable_screen_off.value,
        )
        for each in profile.cores
    )
    return Device(
        name=profile.name,
        title=profile.title,
        ram_bytes=round(memory.ram_gib.value * GIB),
        private_budget_bytes=round(memory.private_budget_mib.value * MIB),
        page_cache_bytes=round(memory.page_cache_mib.value * MIB),
        zram_bytes=None if memory.zram_mib is None else round(memory.zram_mib.value * MIB),
        cores=cores,
        usable_gflops=compute.usable_gflops.value,
        sustained_gflops=compute.sustained_gflops.value,
        thermal=compute.thermal_seconds_share.value,
        flash=Flash(
            kind=flash.type.value,
            read_bytes_per_s=flash.read_mb_per_s.value * MB,
            write_bytes_per_s=flash.write_mb_per_s.value * MB,
            sustained_write_bytes_per_s=flash.sustained_write_mb_per_s.value * MB,
            latency_us=latency_us,
        ),
        facts=tuple(_facts(profile, latency)),
    )


def _facts(profile: ProfileFile, latency: Fact) -> Iterator[Fact]:
    tables: list[tuple[str, Any]] = [("memory", profile.memory)]
    tables += [(f"cores[{index}]", each) for index, each in enumerate(profile.cores)]
    tables += [("compute", profile.compute), ("flash", profile.flash)]
    for path, table in tables:
        for each in dataclasses.fields(table):
            if isinstance(fact := getattr(table, each.name), Sourced):
                yield _fact(f"{path}.{each.name}", fact, profile)
    yield latency
    for index, note in enumerate(profile.low_memory_killer):
        yield _fact(f"low_memory_killer[{index}]", note, profile)


def _fact(key: str, fact: Sourced, profile: ProfileFile) -> Fact:
    unit = next((f" {unit}" for end, unit in UNITS.items() if key.endswith(end)), "")
    source = CITATION.sub(lambda found: profile.sources[found[1]], fact.source)
    return Fact(key=key, text=f"{_text(fact)}{unit}", kind=fact.kind, source=source)


def _text(fact: Any) -> str:
    value = fact.value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:g}"
    if isinstance(value, tuple) and isinstance(value[0], tuple):
        return ", ".join(f"{share:.0%} at {seconds:g} s" for seconds, share in value)
    return f"{value[0]:g} to {value[1]:g}" if isinstance(value, tuple) else str(value)
