"""The study: its search, its tables, and a two-minute version of the whole."""

import json
import subprocess
import sys

import pytest
from PIL import Image

from benchmarks import study, study_jobs, study_page
from host.tiny_base import world


def test_subjects_and_labels_are_what_they_should_be():
    held_out, trained = set(world.holdout()), set(world.vocabulary())
    assert len(study_jobs.SUBJECTS) >= 8
    assert set(study_jobs.SUBJECTS) | set(study_jobs.TUNING) <= held_out
    assert not set(study_jobs.SUBJECTS) & set(study_jobs.TUNING), "rates must not be chosen on the study's own subjects"
    assert set(study_jobs.DRIFT_LABELS) <= trained
    assert len(study_jobs.PROMPT_BACKGROUNDS) == 6
    assert set(study_jobs.PROMPT_BACKGROUNDS) <= set(world.BACKGROUNDS)
    names = [*study_jobs.methods(), *study_jobs.ablations()]
    assert len({study_jobs.method_of(name).title for name in names}) == len(set(names)) == len(names)
    assert {row.rate_of for row in study_jobs.ablations().values()} <= study_jobs.methods().keys()


def test_the_search_starts_with_three_rates_and_goes_on_beyond_an_edge():
    assert study.first_rates(1e-3, 5) == [1e-3, 3.3e-4, 3e-3]
    assert study.next_rates({3.3e-4: 0.2, 1e-3: 0.3, 3e-3: 0.1}, 5) == []
    assert study.next_rates({3.3e-4: 0.1, 1e-3: 0.2, 3e-3: 0.3}, 5) == [9e-3]
    assert study.next_rates({3.3e-4: 0.3, 1e-3: 0.2, 3e-3: 0.1}, 5) == [1.1e-4]
    assert study.next_rates({3.3e-4: 0.1, 1e-3: 0.2, 3e-3: 0.3}, 3) == []
    assert study.next_rates({1e-3: 0.3}, 1) == []


FOUND = {
    "steps": 200,
    "versions": {"torch": "x"},
    "rows": {
        "base": {
            "title": "base",
            "rate": 0.0,
            "subjects": {"a": {"subject": [0.2, 0.2], "recognised": [0, 0], "prompt": [1, 1], "drift": [0, 0]}},
        },
        "lora": {
            "title": "LoRA",
            "rate": 1e-3,
            "subjects": {
                "a": {"subject": [0.4, 0.6], "recognised": [1, 1], "prompt": [0.5, 1], "drift": [0.1, 0.3]},
                "b": {"subject": [0.6, 0.6], "recognised": [0, 1], "prompt": [1, 1], "drift": [0.2, 0.2]},
            },
        },
    },
    "costs": {
        "lora": {
            "peak_private_bytes": 3 << 20,
            "step_ms": 500.0,
            "flops": 2e9,
            "result_bytes": 4 << 20,
            "flash_bytes": 5 << 20,
        }
    },
}


def test_the_tables_hold_the_means_and_the_differences_of_pairs():
    assert study_page.parted(FOUND) == (["base", "lora"], [])
    base, lora = study_page.quality_rows(FOUND, ["base", "lora"], "lora")
    assert base[0] == "base"
    # Only subject a is in both rows: 0.2 - 0.5.
    assert base[3].startswith("-0.300 (")
    assert lora[:2] == ["LoRA", "0.001"]
    assert lora[2].startswith("0.550 (")
    assert lora[4] == "75%"
    assert lora[5].startswith("0.88 (")
    assert study_page.cost_rows(FOUND) == [["LoRA", "3 MiB", "500 ms", "1.7 min", "2.0", "4 MiB", "5 MiB"]]
    assert study_page.markdown(("x", "y"), [["1", "2"]]) == "| x | y |\n|---|---|\n| 1 | 2 |"


def test_the_page_embeds_the_sheets(tmp_path):
    (tmp_path / "study").mkdir()
    Image.new("RGB", (30, 30), "red").save(tmp_path / "study" / "wind-chime.jpg")
    html = study_page.make_page(FOUND, tmp_path)
    assert "data:image/jpeg;base64," in html
    assert "wind chime" in html
    assert "no picture" not in html


def test_the_overview_has_the_rows_it_names(tmp_path):
    rows = [study_jobs.BASE, *study_jobs.methods(), *study_jobs.ablations()]
    tile, head = study_page.TILE, study_page.HEAD
    sheet = Image.new("RGB", (50, head + tile * (len(rows) + 1)), "white")
    for number in range(len(rows)):
        sheet.paste((0, 0, 8 * number), (0, head + tile * (number + 1), 50, head + tile * (number + 2)))
    sheet.save(tmp_path / "sheet.jpg", quality=100)
    study_page.write_overview(tmp_path / "sheet.jpg", tmp_path / "overview.jpg")
    overview = Image.open(tmp_path / "overview.jpg")
    assert overview.height == head + tile * (len(study_page.OVERVIEW) + 1)
    for place, name in enumerate(study_page.OVERVIEW, 1):
        blue = overview.getpixel((25, head + tile * place + tile // 2))[2]
        assert abs(blue - 8 * rows.index(name)) < 4, name


@pytest.mark.long
def test_the_whole_study_in_two_minutes(tmp_path):
    command = [sys.executable, "-m", "benchmarks.study", "--quick", "--work-dir", str(tmp_path), "--workers", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "study.json").read_text())
    assert found["rows"].keys() == {"base", *study.QUICK_METHODS}
    for name, row in found["rows"].items():
        (scores,) = row["subjects"].values()
        for score in study_page.SCORES:
            assert len(scores[score]) == 12, (name, score)
            assert all(-1e-3 <= value <= 1 for value in scores[score]), (name, score)
        if name != "base":
            assert max(scores["drift"]) > 0, "training changed nothing"
    assert found["costs"].keys() == set(study.QUICK_METHODS)
    ours, lora = found["costs"]["ours-50"], found["costs"]["lora"]
    assert ours["peak_private_bytes"] < lora["peak_private_bytes"] / 4
    assert Image.open(tmp_path / "study" / "dango.jpg").width > 6 * study_page.TILE

    # Again: everything is there, nothing is done.
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.png")}
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert json.loads((tmp_path / "study.json").read_text()) == found
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.png")} == before
