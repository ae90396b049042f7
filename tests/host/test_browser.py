"""The reports in a real browser: no complaint, no request, nothing wider than the screen; screenshots are kept."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from host.block_profile_page import write_page as write_profile_page
from host.emulator.report import write_report as write_emulation_report
from host.evaluation.page import write_page as write_evaluation_page
from host.report import write_report
from tests.browser import Browser, browser, find_chromium
from tests.host.emulator.emulations import make_breach, make_emulation, make_faulted, make_killed, make_sampled
from tests.host.test_block_profile import synthetic_profile
from tests.host.test_evaluation import make_evaluation
from tests.host.test_report import make_bundle, make_run

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_chromium() is None and "CI" not in os.environ, reason="no Chromium: make browser"),
]

PAGES = {
    "within": make_emulation,
    "breach": make_breach,
    "faults": make_faulted,
    "sampling": make_sampled,
    "killed": make_killed,
}
SCREENS = {
    "light": {"width": 1200},
    "dark": {"width": 1200, "dark": True},
    "phone": {"width": 390},
    "phone-dark": {"width": 390, "dark": True},
    "print": {"width": 800, "media": "print"},
}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    made = {
        f"emulation-{name}": write_emulation_report(json.loads(json.dumps(make())), folder / f"{name}.html")
        for name, make in PAGES.items()
    }
    made["evaluation"] = write_evaluation_page(make_evaluation(folder / "evaluation"), folder / "evaluation")
    made["block-profile"] = write_profile_page(synthetic_profile(57), folder / "profile.html", 0.5)
    made["report"] = write_report(make_run(folder / "run"), make_bundle(folder / "bundle"), folder / "report.html")
    return made


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("name", [*(f"emulation-{name}" for name in PAGES), "evaluation", "block-profile", "report"])
def test_page_shows_without_complaint(chromium: Browser, pages: dict[str, Path], name: str, screen: str) -> None:
    sight = chromium.look(pages[name], f"{name}-{screen}.png", **SCREENS[screen])
    assert sight.complaints == []
    assert sight.requests == []
    assert sight.overflow_px == 0
    assert "PocketDiT" in sight.title
    with Image.open(sight.screenshot) as shot:
        assert shot.height > 2 * shot.width
        colors = shot.convert("RGB").getpixel((2, 300))
    if screen != "print":
        assert (max(colors) < 60) == screen.endswith("dark")


def test_complaints_requests_and_overflow_are_seen(chromium: Browser, tmp_path: Path) -> None:
    """The checks above can fail: a page that does all three wrong is caught."""
    page = tmp_path / "bad.html"
    page.write_text(
        "<title>bad</title><script>console.error('broken'); throw new Error('thrown')</script>"
        '<img src="missing.png"><div style="width:3000px">wide</div>'
    )
    sight = chromium.look(page, "bad.png")
    assert any("broken" in complaint for complaint in sight.complaints)
    assert any("thrown" in complaint for complaint in sight.complaints)
    assert [url for url in sight.requests if url.endswith("missing.png")]
    assert sight.overflow_px > 1000
