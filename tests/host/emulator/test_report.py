"""Tests of the emulation's report: its values, what it says of weak checks, structure and safety; not looks."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from host.charts import Mark, Series, line_chart, stacked_columns
from host.emulator.device import MIB
from host.emulator.report import write_report
from tests.host.emulator.emulations import (
    make_breach,
    make_emulation,
    make_faulted,
    make_killed,
    make_sampled,
)
from tests.page_check import Page

SECTIONS = (
    "numbers",
    "summary",
    "memory",
    "time",
    "flash",
    "enforcement",
    "faults",
    "projection",
    "device",
    "details",
)
MAKERS = (make_emulation, make_breach, make_faulted, make_sampled, make_killed)


def _render(tmp_path: Path, emulation: dict[str, Any]) -> tuple[str, Page]:
    path = write_report(json.loads(json.dumps(emulation)), tmp_path / "emulation.html")
    html = path.read_text("utf-8")
    return html, Page(html)


def _section(html: str, name: str) -> str:
    """The text of one section."""
    found = re.search(rf'<section id="{name}".*?</section>', html, re.DOTALL)
    assert found
    return Page(found[0]).text


@pytest.mark.parametrize("make", MAKERS)
def test_page_is_well_formed_and_loads_nothing(tmp_path: Path, make) -> None:
    html, page = _render(tmp_path, make())
    assert tuple(page.values("section", "id")) == SECTIONS
    assert not {"script", "iframe", "object", "img", "form"} & {tag for tag, _ in page.tags}
    assert page.values("link", "href") == ["data:,"]
    assert "url(" not in html
    assert "@import" not in html
    assert not [attrs for _, attrs in page.tags if "src" in attrs or "onclick" in attrs]
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'" in page.values("meta", "content")
    assert all(page.values("svg", "aria-label"))
    assert not any("nan" in path or "inf" in path for path in page.values("path", "d"))


def test_verdict_stands_at_the_top(tmp_path: Path) -> None:
    html, _ = _render(tmp_path, make_emulation())
    verdict = re.search(r'<p class="verdict">(.*?)</p>', html)
    assert verdict
    assert Page(verdict[1]).text.startswith("Within budget20 steps took at most 61.4 MiB")
    assert '<span class="badge">Within budget' in html
    assert html.index('class="verdict"') < html.index("<section")
    assert 'class="callout"' not in html


def test_measured_values_appear(tmp_path: Path) -> None:
    emulation = make_emulation()
    peak = emulation["peak"]
    html, page = _render(tmp_path, emulation)
    summary = _section(html, "summary")
    for text in (
        f"{peak['private_bytes'] / MIB:.0f} MiB beyond idle",
        f"at {peak['seconds']:.3g} s in backward of block {peak['block']}, step {peak['step']}",
        "96 MiB beyond idle, from --budget",
        "58 MiB, counted before the start",
        "187 MiB private, 142 MiB of files",
        "(1.2% apart from the sampled one)",
        "0 out-of-memory kills, limit hit 12 times, CPU held back for 3 s",
        "0.2213 at the start, 0.1894 at the end",
    ):
        assert text in summary, text
    assert "968 ms" in page.text
    flash = _section(html, "flash")
    assert "1.59 GiB in all, limited to 2,100 MB/s" in flash
    assert "checkpoints 7 MiB, metrics 21.5 KiB, adapter 2 MiB" in flash
    assert "80 µs on the phone, not imposed on each read" in flash
    outside = 1630 - sum(row["flash_read_bytes"] for row in emulation["steps"]) / MIB
    assert f"of it outside of the steps{max(0, outside):.3g}" in flash
    assert "pocketdit emulate bundles/sana-dog --device pixel-8 --budget 96MiB" in page.text


def test_budget_line_and_idle_share_are_in_the_memory_section(tmp_path: Path) -> None:
    html, page = _render(tmp_path, make_emulation())
    memory = _section(html, "memory")
    assert "budget 96 MiB" in memory
    assert "The idle process holds 187 MiB of private memory, left out of this chart." in memory
    for phase in ("load", "checkpoint", "adapter", "every other step", "file-backed", "the kernel's figure, less idle"):
        assert phase in memory
    assert page.values("rect", "class").count("band c3") == 4  # the adapter, in two charts drawn twice


def test_highest_by_phase_is_that_of_the_samples(tmp_path: Path) -> None:
    emulation = make_emulation(
        phases=["load", "backward"],
        samples=[
            [0.0, 5 * MIB, 0, None, 0, -1, 0],
            [1.5, 61 * MIB, 0, None, 1, 9, 2],
            [2.0, 12 * MIB, 0, None, 1, 1, 3],
        ],
    )
    memory = _section(_render(tmp_path, emulation)[0], "memory")
    assert "backward61 MiBbackward of block 9, step 2, at 1.5 s" in memory
    assert "load5 MiBload, at 0 s" in memory.replace("5.0 MiB", "5 MiB")


def test_curves_end_where_no_process_was_there(tmp_path: Path) -> None:
    rows = [[0.02 * number + (3.0 if number > 50 else 0.0), 9 * MIB, MIB, None, 2, 1, 1] for number in range(100)]
    html, page = _render(tmp_path, make_emulation(samples=rows))
    assert "Where the curves are broken no process was there." in _section(html, "memory")
    areas = [str(attrs["d"]) for tag, attrs in page.tags if tag == "path" and attrs.get("class") == "area c1"]
    assert [area.count("M") for area in areas] == [2, 2]
    assert "no process was there" not in _section(_render(tmp_path, make_emulation())[0], "memory")


def test_breach_is_named_marked_and_red(tmp_path: Path) -> None:
    html, page = _render(tmp_path, make_breach())
    assert '<span class="badge bad">Over budget' in html
    assert (
        "Breach at 4.04 s in backward of block 7, step 3: 97 MiB private beyond idle where 96 MiB are allowed"
        in page.text
    )
    assert "seen by the sampler" in page.text
    assert '<strong class="bad">97.3' in html
    assert ">breach</text>" in html
    assert "No projection" in _section(html, "projection")


def test_kill_by_the_kernel_before_any_step(tmp_path: Path) -> None:
    html, page = _render(tmp_path, make_killed())
    assert '<span class="badge bad">Killed' in html
    assert "Breach at 0.22 s in load: the kernel ended it at 90 MiB private beyond idle" in page.text
    assert "1 out-of-memory kill," in page.text
    assert "No step was finished." in _section(html, "time")


def test_refusal_by_the_runtime_itself(tmp_path: Path) -> None:
    emulation = make_killed()
    emulation["breach"]["by"] = "runtime"
    emulation["peak"]["planned_private_bytes"] = 0
    html, page = _render(tmp_path, emulation)
    assert "in load: the runtime itself stopped: its plan or its own measurement is above 96 MiB." in page.text
    assert "Planned—" in _section(html, "summary")


def test_run_that_never_started_gives_notes(tmp_path: Path) -> None:
    bare = {"schema": "pocketdit.emulation/1", "verdict": "failed", "reason": "The bundle is altered."}
    html, page = _render(tmp_path, bare)
    assert "FailedThe bundle is altered." in page.text
    assert "No memory was sampled" in _section(html, "memory")
    assert "No projection" in page.text
    assert "The profile lists no facts." in page.text
    assert "None was asked for." in page.text


def test_sampling_is_called_weaker_and_every_note_is_shown(tmp_path: Path) -> None:
    emulation = make_sampled()
    html, _ = _render(tmp_path, emulation)
    top = html[: html.index('<section id="summary"')]
    assert "Weaker check." in top
    assert '<strong class="bad">sampling</strong>' in top
    enforcement = _section(html, "enforcement")
    for note in emulation["enforcement"]["notes"]:
        assert note in enforcement
    assert "weaker: looked at every 20 ms and killed when over" in enforcement
    assert "weaker: the reader waits to keep the bandwidth" in enforcement
    assert "not limited: step times are this machine's" in enforcement
    assert "Page cache dropped firstno" in enforcement
    assert "Locked pages3 MiB" in enforcement.replace("3.00", "3")
    assert "the kernel's figure" not in _section(html, "memory")
    assert "80 µs on the phone, imposed on each read" in _section(html, "flash")
    assert "Weaker" not in _render(tmp_path, make_emulation())[1].text


def test_enforced_limits_say_what_they_are_set_to(tmp_path: Path) -> None:
    enforcement = _section(_render(tmp_path, make_emulation())[0], "enforcement")
    assert "cgroup v1the kernel enforces the limit1.05 GiB with idle share and page cache" in enforcement
    assert "the time of 1.6 cores" in enforcement
    assert "read 2,100 MB/s, write 400 MB/s" in enforcement


def test_faults_are_listed_and_marked(tmp_path: Path) -> None:
    html, _ = _render(tmp_path, make_faulted())
    faults = _section(html, "faults")
    assert "The adapter equals bit for bit the one of an undisturbed run." in faults
    assert faults.count("recovered") == 6
    assert faults.count("not recovered") == 1
    assert "EIO on <b>block</b> 7" in faults
    assert "<b>" not in html
    for kind in ("kill", "low-memory", "disk-full", "slow-reads", "failing-read", "thermal"):
        assert f">{kind}</text>" in html
        assert kind in faults
    assert html.count('<path class="mark"') == 6 * 2 * 2
    other = _section(_render(tmp_path, make_faulted() | {"adapter_equals_undisturbed": False})[0], "faults")
    assert "The adapter differs from the one of an undisturbed run." in other


def test_projection_stands_apart_with_its_assumptions(tmp_path: Path) -> None:
    emulation = make_emulation()
    html, _ = _render(tmp_path, emulation)
    projection = _section(html, "projection")
    assert "Arithmetic, not a measurement: nothing here ran on that phone." in projection
    assert "A step, phone cool3.52 s to 6.98 s" in projection
    assert "A step, phone hot7.23 s to 14.2 s" in projection
    assert "of it reading flashnone" in projection
    assert "A run of 400 steps" in projection
    for assumption in emulation["projection"]["assumptions"]:
        assert assumption in projection
        assert assumption not in _section(html, "summary")


def test_projection_of_the_bare_contract_is_shown(tmp_path: Path) -> None:
    bare = {"step_seconds": {"low": 1, "high": 2}, "compute_seconds": 1.5, "flash_seconds": 0.25, "assumptions": []}
    projection = _section(_render(tmp_path, make_emulation(projection=bare))[0], "projection")
    assert "1 s to 2 s" in projection
    assert "1.5 s" in projection
    assert "0.25 s" in projection


def test_each_fact_of_the_device_has_kind_and_source(tmp_path: Path) -> None:
    emulation = make_emulation()
    html, page = _render(tmp_path, emulation)
    device = _section(html, "device")
    facts = emulation["device"]["facts"]
    for fact in facts:
        assert fact["text"] in device
        assert fact["source"] in device
    counts = [sum(fact["kind"] == kind for fact in facts) for kind in ("published", "measured", "estimated")]
    assert "{} published, {} measured, {} estimated.".format(*counts) in device
    links = page.values("a", "href")
    assert links
    assert all(re.fullmatch(r"https?://[^\"<>\s]+", link) for link in links)


def test_hostile_profile_cannot_script(tmp_path: Path) -> None:
    fact = {
        "key": "memory.ram_gib",
        "text": "<script>alert(1)</script>",
        "kind": "published",
        "source": 'javascript:alert(1) https://x.org/"onmouseover=alert(1)',
    }
    emulation = make_emulation(device={"title": "<i>phone</i>", "facts": [fact]}, bundle="a/<u>b</u>")
    html, page = _render(tmp_path, emulation)
    assert "<script" not in html
    assert "<i>" not in html
    assert "<u>" not in html
    assert not [attrs for _, attrs in page.tags if "onmouseover" in attrs]
    assert all(link.startswith("https://x.org/") for link in page.values("a", "href"))


def test_missing_and_infinite_values_are_never_drawn(tmp_path: Path) -> None:
    emulation = make_emulation()
    emulation["samples"][3][1], emulation["samples"][4][1], emulation["samples"][5][2] = None, math.nan, math.inf
    emulation["steps"][2]["read_ms"] = None
    emulation["steps"][3]["step_ms"] = math.nan
    _, page = _render(tmp_path, emulation)
    assert not any("nan" in path or "inf" in path for path in page.values("path", "d"))
    assert not any("nan" in height for height in page.values("rect", "height"))


def test_many_steps_are_not_shaded_and_bars_are_means(tmp_path: Path) -> None:
    emulation = make_emulation()
    step = emulation["steps"][4]
    emulation["steps"] = [step | {"step": number} for number in range(1, 501)]
    emulation["samples"] = [[0.1 * number, 30 * MIB, 0, None, 2, 1, 1 + number // 4] for number in range(2000)]
    html, page = _render(tmp_path, emulation)
    assert "every other step" not in page.text
    assert "step 1 to 4, mean" in html
    assert len(html) < 700_000


def test_other_schema_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"schema 'pocketdit\.run/1', expected 'pocketdit\.emulation/1'"):
        write_report({"schema": "pocketdit.run/1"}, tmp_path / "emulation.html")
    assert not list(tmp_path.iterdir())


def test_columns_of_a_chart_are_as_high_as_their_values() -> None:
    drawn = Page(stacked_columns([(1, [1.0, 3.0])], [("a", "c1"), ("b", "c2")], title="t", x_label="x", y_label="y"))
    heights = [
        float(height)
        for height, css in zip(drawn.values("rect", "height"), drawn.values("rect", "class"), strict=True)
        if css.startswith("fill")
    ]
    assert heights[1] == pytest.approx(3 * heights[0], rel=0.02)


def test_labels_of_marks_never_overlap() -> None:
    series = [Series(label="s", points=[(0, 1.0), (10, 1.0)], style="line", color="c1")]
    marks = [Mark(x=x, label="a long label") for x in (1, 1.1, 1.2, 1.3, 9.9)]
    drawn = line_chart(series, title="t", x_label="x", y_label="y", marks=marks)
    wide = drawn[: drawn.index('class="chart narrow"')]
    places = re.findall(r'<text class="mark" x="([\d.]+)" y="([\d.]+)" text-anchor="(\w+)"', wide)
    assert len(places) == 4  # three rows near 1, one at the right edge; the fourth near 1 tells on hover
    assert len({y for _, y, anchor in places if anchor == "start"}) == 3
    assert [anchor for _, _, anchor in places].count("end") == 1
    assert wide.count("<title>a long label</title>") == 5
