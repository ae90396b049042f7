"""Tests of device profiles: the shipped ones are whole and sourced, a user's own is read, a broken one is told everything."""

import dataclasses
import importlib.resources
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from host.emulator.device import GIB, MIB, known_devices, load_device
from runtime.errors import SchemaError

PROFILES = Path(str(importlib.resources.files("host.emulator"))) / "profiles"
OWN = """
name = "my-phone"
title = "My phone"

[sources]
maker = "https://example.org/specifications"

[memory]
ram_gib = { value = 6, kind = "published", source = "[maker]" }
private_budget_mib = { value = 1500.5, kind = "measured", source = "killed at 1.6 GiB, three times" }
page_cache_mib = { value = 400, kind = "estimated", source = "a guess" }

[compute]
usable_gflops = { value = [40, 80], kind = "estimated", source = "25 to 50 % of peak" }
sustained_gflops = { value = [20, 40], kind = "measured", source = "[maker], half" }
thermal_seconds_share = { value = [[0, 1], [100, 0.5]], kind = "measured", source = "a timed run" }

[[cores]]
name = { value = "Cortex-A78", kind = "published", source = "[maker]" }
cluster = "big"
count = { value = 2, kind = "published", source = "[maker]" }
clock_ghz = { value = 2.5, kind = "published", source = "[maker]" }
flops_per_cycle = { value = 16, kind = "estimated", source = "its manual" }
usable_screen_off = { value = false, kind = "measured", source = "/dev/cpuset" }

[[cores]]
name = { value = "Cortex-A55", kind = "published", source = "[maker]" }
cluster = "little"
count = { value = 4, kind = "published", source = "[maker]" }
clock_ghz = { value = 2.0, kind = "published", source = "[maker]" }
flops_per_cycle = { value = 8, kind = "estimated", source = "its manual" }
usable_screen_off = { value = true, kind = "measured", source = "/dev/cpuset" }

[flash]
type = { value = "UFS 2.2", kind = "published", source = "[maker]" }
read_mb_per_s = { value = 500, kind = "measured", source = "dd" }
write_mb_per_s = { value = 300, kind = "measured", source = "dd" }
sustained_write_mb_per_s = { value = 100, kind = "measured", source = "dd, a minute long" }
random_read_iops = { value = 20000, kind = "measured", source = "fio" }
random_write_iops = { value = 15000, kind = "measured", source = "fio" }
queue_depth = { value = 4, kind = "measured", source = "fio's iodepth" }

[[low_memory_killer]]
value = "Kills at 90 % of swap."
kind = "measured"
source = "logcat"
"""


def _numbers(value: Any) -> list[float]:
    if isinstance(value, bool):
        return []
    if isinstance(value, int | float):
        return [value]
    return [number for each in value for number in _numbers(each)] if isinstance(value, list) else []


def _tables(value: Any) -> list[dict[str, Any]]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return ([value] if isinstance(value, dict) else []) + [table for each in inner for table in _tables(each)]


@pytest.fixture
def write(tmp_path: Path):
    def write_profile(*changes: tuple[str, str]) -> Path:
        text = OWN
        for old, new in changes:
            assert text.count(old) >= 1, old
            text = text.replace(old, new)
        path = tmp_path / "my-phone.toml"
        path.write_text(text)
        return path

    return write_profile


def test_phones_from_entry_level_to_flagship_are_shipped() -> None:
    assert len(known_devices()) >= 8
    devices = [load_device(name) for name in known_devices()]
    assert min(device.ram_bytes for device in devices) == 4 * GIB
    assert max(device.ram_bytes for device in devices) == 16 * GIB
    assert {device.flash.kind for device in devices} == {"eMMC 5.1", "UFS 2.2", "UFS 3.1", "UFS 4.0"}
    assert len({device.title for device in devices}) == len(devices)


@pytest.mark.parametrize("name", known_devices())
def test_every_number_of_a_shipped_profile_has_kind_and_source(name: str) -> None:
    data = tomllib.loads((PROFILES / f"{name}.toml").read_text())
    found = 0
    for table in _tables(data):
        numbers = [number for value in table.values() for number in _numbers(value)]
        if numbers:
            found += 1
            assert table["kind"] in ("published", "measured", "estimated")
            assert len(table["source"]) >= 5
    assert found >= 15
    facts = load_device(name).facts
    assert all(len(fact.source) > 5 and "[" not in fact.source for fact in facts)
    published = [fact for fact in facts if fact.kind != "estimated" and not fact.key.startswith("low_memory")]
    assert any(fact.source.startswith("https://") for fact in published)


@pytest.mark.parametrize("name", known_devices())
def test_a_shipped_profile_agrees_with_itself(name: str) -> None:
    device = load_device(name)
    assert device.name == name
    fast = [core for core in device.cores if core.cluster != "little"]
    all_cores = sum(core.count for core in fast) == 2  # two big and six little ones: a product uses them all
    peak = sum(core.peak_gflops for core in (device.cores if all_cores else fast))
    assert device.usable_gflops[0] == pytest.approx(0.25 * peak, rel=0.07)
    assert device.usable_gflops[1] == pytest.approx(0.5 * peak, rel=0.07)
    kept = device.thermal[-1][1]
    assert device.sustained_gflops == pytest.approx(tuple(kept * speed for speed in device.usable_gflops), rel=0.03)
    assert (
        device.private_budget_bytes / device.ram_bytes == pytest.approx(0.35, abs=0.01) or device.ram_bytes == 4 * GIB
    )
    assert device.page_cache_bytes / device.ram_bytes == pytest.approx(0.08, abs=0.003)
    assert 0.3 < device.screen_off_share <= 1
    assert 50 < device.flash.latency_us < 500


def test_own_profile_needs_no_code(write) -> None:
    device = load_device(write())
    assert (device.name, device.title, device.ram_bytes) == ("my-phone", "My phone", 6 * GIB)
    assert device.private_budget_bytes == int(1500.5 * MIB)
    assert device.flash.read_bytes_per_s == 500e6
    assert device.flash.latency_us == pytest.approx(200)
    assert device.zram_bytes is None
    assert [core.peak_gflops for core in device.cores] == [80, 64]
    assert device.screen_off_share == pytest.approx(64 / 144)
    by_key = {fact.key: fact for fact in device.facts}
    assert by_key["cores[0].clock_ghz"].text == "2.5 GHz"
    assert by_key["cores[0].clock_ghz"].source == "https://example.org/specifications"
    assert by_key["compute.sustained_gflops"].source == "https://example.org/specifications, half"
    assert by_key["compute.thermal_seconds_share"].text == "100% at 0 s, 50% at 100 s"
    assert by_key["flash.latency_us"].kind == "estimated"
    assert by_key["low_memory_killer[0]"].text == "Kills at 90 % of swap."
    assert load_device(str(write())) == device


def test_heat_slows_the_phone_along_its_curve(write) -> None:
    device = load_device(write())
    assert [device.speed_share(seconds) for seconds in (0, 50, 100, 1e6)] == pytest.approx([1, 0.75, 0.5, 0.5])


def test_device_is_plain_json_and_cannot_be_changed(write) -> None:
    device = load_device(write())
    values = json.loads(json.dumps(device.to_dict()))
    assert values["flash"]["kind"] == "UFS 2.2"
    assert values["usable_gflops"] == [40, 80]
    assert values["facts"][0] == {
        "key": "memory.ram_gib",
        "text": "6 GiB",
        "kind": "published",
        "source": "https://example.org/specifications",
    }
    with pytest.raises(dataclasses.FrozenInstanceError):
        device.ram_bytes = 1  # type: ignore[misc]


def test_unknown_name_lists_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'Pixel 8a', .*Did you mean pixel-8\? .*galaxy-a14, .*xiaomi-14"):
        load_device("Pixel 8a")
    with pytest.raises(ValueError, match=r"'quantum', which is no known device\. Known devices"):
        load_device("quantum")


def test_unreadable_file_lists_the_known_names(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.toml cannot be read .*pixel-8"):
        load_device(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="cannot be read"):
        load_device(tmp_path / "binary.toml")
    (tmp_path / "text.toml").write_text("a phone")
    with pytest.raises(SchemaError, match="not TOML"):
        load_device(tmp_path / "text.toml")


def test_all_problems_of_a_broken_file_are_told_at_once(write) -> None:
    path = write(
        ("ram_gib = { value = 6, ", "ram_gb = { value = 6, "),
        ("page_cache_mib = { value = 400", "page_cache_mib = { value = 400000000"),
        ("read_mb_per_s = { value = 500,", "read_mib_per_s = { value = 500,"),
        ('kind = "measured", source = "fio"', 'kind = "rumoured", source = "fio"'),
        ("clock_ghz = { value = 2.5", "clock_ghz = { value = 2500"),
        ('queue_depth = { value = 4, kind = "measured", source = "fio\'s iodepth" }', ""),
        ('source = "a guess"', 'source = " "'),
        ('source = "a timed run"', 'source = "[nowhere]"'),
        ('cluster = "little"', 'cluster = "tiny"\ncolour = "red"'),
    )
    with pytest.raises(SchemaError) as caught:
        load_device(path)
    for fault in (
        "unknown key 'memory.ram_gb'",
        "missing key 'memory.ram_gib'",
        "memory.ram_gb: wrong unit, expected memory.ram_gib",
        "memory.page_cache_mib: got 4e+08, expected 16 to 32768; is it in another unit?",
        "memory.page_cache_mib: source: got an empty text",
        "flash.read_mib_per_s: wrong unit, expected flash.read_mb_per_s",
        "flash.random_read_iops.kind: got 'rumoured', expected one of 'published', 'measured', 'estimated'",
        "cores[0].clock_ghz: got 2500, expected 0.2 to 6",
        "missing key 'flash.queue_depth'",
        "source [nowhere] is not in [sources]",
        "cores[1].cluster: got 'tiny', expected one of 'big', 'mid', 'little'",
        "unknown key 'cores[1].colour'",
    ):
        assert fault in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ('name = "my-phone"', 'name = "My Phone"', "name: got 'My Phone', expected small letters"),
        ("value = 1500.5", "value = 6000", "make 6400 MiB, more than ram_gib"),
        ("value = [40, 80]", "value = [80, 40]", "usable_gflops: got 80 to 40, expected the smaller first"),
        ("value = [20, 40]", "value = [20, 90]", "sustained_gflops: more than usable_gflops"),
        ("value = [40, 80]", "value = [40]", "compute.usable_gflops.value: got [40], expected a list of 2"),
        ("[[0, 1], [100, 0.5]]", "[[5, 1], [100, 0.5]]", "from 0 seconds on"),
        ("[[0, 1], [100, 0.5]]", "[[0, 1], [0, 0.5]]", "later ones later"),
        ("[[0, 1], [100, 0.5]]", "[[0, 1], [nan, 0.5]]", "later ones later"),
        ("[[0, 1], [100, 0.5]]", "[]", "from 0 seconds on"),
        ("[[0, 1], [100, 0.5]]", "[[0, 100], [100, 50]]", "expected shares above 0 and up to 1"),
        ("count = { value = 2,", "count = { value = 2.5,", "cores[0].count: got 2.5, expected a whole number"),
        ("value = 100, kind", "value = 400, kind", "sustained_write_mb_per_s: more than write_mb_per_s"),
        ("value = 6, kind", "value = nan, kind", "memory.ram_gib: got nan, expected 0.5 to 64"),
        ("value = false", "value = 0", "cores[0].usable_screen_off.value: got 0, expected a bool"),
        ("[sources]", '[sources]\nspare = "x"', "sources.spare: no fact cites it"),
        ('title = "My phone"', "title = 8", "title: got 8, expected a str"),
    ],
)
def test_a_value_that_cannot_be_is_refused(write, old: str, new: str, fault: str) -> None:
    with pytest.raises(SchemaError) as caught:
        load_device(write((old, new)))
    assert fault in str(caught.value)


def test_no_cores_and_no_tables_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.toml"
    path.write_text('name = "x"\ntitle = "X"\ncores = []\nmemory = 3\n')
    with pytest.raises(
        SchemaError, match=r"missing key 'compute'; missing key 'flash'|memory: got 3, expected a table"
    ):
        load_device(path)


def test_profiles_are_installed_with_the_package() -> None:
    pyproject = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    assert pyproject["tool"]["setuptools"]["package-data"]["host.emulator"] == ["profiles/*.toml"]
