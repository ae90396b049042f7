"""Tests of the report page: structure, safety and tolerance, not looks."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw

from host.charts import format_tick, moving_mean, nice_ticks
from host.report import summary_table, write_report
from tests.page_check import Page

MIB = 1024 * 1024
PROMPT = 'a photo of <b>my</b> "sks" cat & 🐱'
PROMPTS = (PROMPT, "a sks cat on a red sofa, evening light", "a sks cat's portrait <script>alert(1)</script>")
SECTIONS = ("numbers", "photos", "pictures", "loss", "memory", "time", "patches", "settings")
SHARED_PHOTOS = Path(__file__).parents[3] / "shared/photos/cat"


def _draw(path: Path, seed: int, side: int = 128) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    image = Image.new("RGB", (side, side), tuple(draw.randrange(90, 230) for _ in range(3)))
    canvas = ImageDraw.Draw(image)
    for _ in range(4):
        x, y, radius = (draw.uniform(0.2, 0.8) * side for _ in range(3))
        canvas.ellipse((x - radius / 3, y - radius / 3, x + radius / 3, y + radius / 3), fill=draw.randrange(1 << 24))
    image.save(path)


def _row(step: int, draw: random.Random) -> dict[str, Any]:
    read, forward, backward = (abs(draw.gauss(mean, mean / 12)) for mean in (38, 241, 497))
    return {
        "step": step,
        "seconds": step * 0.82,
        "loss": 0.06 + 0.11 * math.exp(-step / 90) * draw.lognormvariate(0, 0.45) + abs(draw.gauss(0, 0.02)),
        "learning_rate": 1e-4,
        "step_ms": read + forward + backward + 31,
        "read_ms": read,
        "forward_ms": forward,
        "backward_ms": backward,
        "optimizer_ms": 9.0,
        "private_bytes": int((33 + 3 * draw.random()) * MIB * min(1, 0.4 + step / 6)),
        "peak_private_bytes": int(min(41, 30 + step) * MIB),
        "file_bytes": int(min(412, 90 * step) * MIB),
        "streamed_bytes": int(step * 31.6 * MIB),
        "flash_read_bytes": int(min(412, 90 * step) * MIB),
        "samples": [step % 256],
    }


def make_bundle(bundle_dir: Path) -> Path:
    """Writes the parts of a bundle that the report reads."""
    photos = sorted(SHARED_PHOTOS.glob("*.jpg"))[:5] if SHARED_PHOTOS.is_dir() else []
    (bundle_dir / "preview").mkdir(parents=True)
    for index in range(5):
        preview_path = bundle_dir / f"preview/{index}.jpg"
        if photos:
            with Image.open(photos[index]) as photo:
                photo.thumbnail((256, 256))
                photo.convert("RGB").save(preview_path)
        else:
            _draw(preview_path, index, 256)
    strip = Image.new("RGB", (680, 96), "white")
    for index in range(7):
        with Image.open(bundle_dir / f"preview/{index % 5}.jpg") as photo:
            side = 40 + 30 * index
            strip.paste(
                photo.crop((60, 30, 60 + min(side, 190), 30 + min(side, 190))).resize((92, 92)), (index * 97, 2)
            )
    strip.save(bundle_dir / "preview/crops.png")
    entries = [
        {"name": f"{i}.jpg", "caption": f"a sks cat, photo {i}", "preview": f"preview/{i}.jpg"} for i in range(5)
    ]
    manifest = {
        "schema": "pocketdit.bundle/1",
        "created_by": "pocketdit 0.1.0",
        "base": {"family": "sana", "model": "host/tiny_base", "sha256": "5f" * 32, "num_blocks": 14},
        "cut": {"head": 4, "tail": 3},
        "lora": {"rank": 4, "alpha": 4.0, "targets": ["attn1.to_q", "attn1.to_k", "attn1.to_v", "attn2.to_q"]},
        "samples": {"count": 256, "dtype": "bf16"},
        "training": {"optimizer": "adamw", "betas": [0.9, 0.999], "sampler": {"name": "patch", "seed": 0}},
        "subject": {"instance_prompt": PROMPT, "photos": entries},
        "programs": {"methods": {"sana_block_forward": {"planned_bytes": 4_900_000}}},
    }
    (bundle_dir / "manifest.json").write_text(json.dumps(manifest))
    return bundle_dir


def make_run(run_dir: Path, num_steps: int = 400, status: str = "complete", pictures: bool = True) -> Path:
    """Writes a run folder as training and `pocketdit generate` leave it."""
    run_dir.mkdir(parents=True)
    draw = random.Random(0)
    rows = [_row(step, draw) for step in range(1, num_steps + 1)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run: dict[str, Any] = {
        "schema": "pocketdit.run/1",
        "status": status,
        "version": "0.1.0",
        "settings": {"steps": 400, "learning_rate": 1e-4, "resume": None, "shuffle": True},
        "budget_mib": 96,
        "idle_private_bytes": 183 * MIB,
        "summary": {},
        "versions": {"torch": "2.13.0", "executorch": "1.4.0"},
    }
    if status == "complete":
        run["summary"] = {
            "steps": num_steps,
            "step_ms_median": 812.4,
            "peak_private_bytes": 41 * MIB,
            "streamed_bytes": 12.3 * 1024 * MIB,
            "flash_read_bytes": 412 * MIB,
            "seconds": 328.0,
        }
    (run_dir / "run.json").write_text(json.dumps(run))
    if pictures:
        items = []
        for index, prompt in enumerate(PROMPTS):
            for seed in range(3):
                item: dict[str, Any] = {"prompt": prompt, "seed": seed, "unseen": index > 0}
                item |= {"similarity_base": 0.24 + 0.05 * seed, "similarity_adapter": 0.55 + 0.05 * seed}
                for key, shift in (("base", 100), ("adapter", 200)):
                    item[key] = f"{key}/p{index}_s{seed}.png"
                    _draw(run_dir / "pictures" / item[key], shift + 10 * index + seed)
                items.append(item)
        made = {"steps": 24, "guidance": 3.0, "items": items, "similarity": {"base": 0.31, "adapter": 0.62}}
        (run_dir / "pictures/pictures.json").write_text(json.dumps(made))
    return run_dir


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture
def bundle_dir(tmp_path: Path) -> Path:
    return make_bundle(tmp_path / "bundle")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


def _render(run_dir: Path, bundle_dir: Path) -> tuple[str, Page]:
    page = write_report(run_dir, bundle_dir).read_text("utf-8")
    return page, Page(page)


def test_page_is_well_formed_and_has_all_sections_in_order(run_dir: Path, bundle_dir: Path) -> None:
    _, page = _render(run_dir, bundle_dir)
    assert tuple(page.values("section", "id")) == SECTIONS
    assert (
        "subject similarity rose from 0.31 to 0.62 in 400 steps; peak private memory 41 MiB of a budget of 96 MiB."
        in (page.text.lower().replace("mib", "MiB"))
    )
    assert len(page.values("svg", "class")) == 2 * 4
    assert len(page.values("img", "src")) == 3 + 5 + 2 * 9 + 1


def test_page_makes_no_request(run_dir: Path, bundle_dir: Path) -> None:
    text, page = _render(run_dir, bundle_dir)
    assert "http://" not in text
    assert "https://" not in text
    assert "url(" not in text
    assert "@import" not in text
    assert all(source.startswith("data:image/") for source in page.values("img", "src"))
    assert page.values("link", "href") == ["data:,"]
    assert not {"script", "iframe", "object", "video", "form"} & {tag for tag, _ in page.tags}
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'" in page.values("meta", "content")


def test_user_strings_are_escaped(run_dir: Path, bundle_dir: Path) -> None:
    text, page = _render(run_dir, bundle_dir)
    assert "<b>" not in text
    assert "<script" not in text
    assert PROMPT in page.text
    assert PROMPTS[2] in page.text


def test_lone_surrogate_in_a_prompt_is_replaced(run_dir: Path, bundle_dir: Path) -> None:
    _edit(bundle_dir / "manifest.json", subject={"instance_prompt": "cat \ud83d", "photos": []})
    assert "cat ?" in _render(run_dir, bundle_dir)[1].text


def test_pictures_and_charts_have_alternative_texts(run_dir: Path, bundle_dir: Path) -> None:
    _, page = _render(run_dir, bundle_dir)
    assert all(page.values("img", "alt"))
    assert all(page.values("svg", "aria-label"))


def test_run_without_pictures_names_the_command(tmp_path: Path, bundle_dir: Path) -> None:
    _, page = _render(make_run(tmp_path / "run", pictures=False), bundle_dir)
    assert f"pocketdit generate {tmp_path / 'run'}" in page.text
    assert "subject similarity is not measured yet" in page.text


def test_pictures_without_similarity_name_the_command(run_dir: Path, bundle_dir: Path) -> None:
    items = json.loads((run_dir / "pictures/pictures.json").read_text())["items"]
    bare = [{key: value for key, value in item.items() if not key.startswith("similarity")} for item in items]
    _edit(run_dir / "pictures/pictures.json", items=bare, similarity=None)
    assert f"pocketdit evaluate {run_dir}" in _render(run_dir, bundle_dir)[1].text


def test_stopped_run_with_a_cut_last_line(tmp_path: Path, bundle_dir: Path) -> None:
    run_dir = make_run(tmp_path / "run", num_steps=57, status="stopped", pictures=False)
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step":58,"loss":0.1,"grad_no')
    _, page = _render(run_dir, bundle_dir)
    assert "Stopped early. Trained for 57 of 400 steps" in page.text
    assert "mean of 5 steps" in page.text


def test_empty_run_and_missing_bundle_give_notes(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", num_steps=0, status="running", pictures=False)
    _, page = _render(run_dir, tmp_path / "nowhere")
    assert tuple(page.values("section", "id")) == SECTIONS
    assert page.text.count("pocketdit train") == 3
    assert "Not finished yet." in page.text


def test_nan_is_never_drawn(run_dir: Path, bundle_dir: Path) -> None:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rows[3]["loss"], rows[4]["loss"], rows[5]["private_bytes"] = math.nan, math.inf, None
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, page = _render(run_dir, bundle_dir)
    assert not any("nan" in path or "inf" in path for path in page.values("path", "d"))
    assert "loss was not finite: 2." in page.text


def test_killed_run_takes_its_totals_from_the_last_row(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", num_steps=57, status="running", pictures=False)
    table = summary_table(run_dir)
    for text in ("57 of 400", "41 MiB of 96 MiB", "1.76 GiB streamed", "412 MiB from the device"):
        assert text in table


def test_failed_run_is_called_failed(run_dir: Path, bundle_dir: Path) -> None:
    _edit(run_dir / "run.json", status="failed")
    assert "Ended by an error." in _render(run_dir, bundle_dir)[1].text


def test_long_run_draws_a_bounded_number_of_points_and_keeps_the_peak(tmp_path: Path, bundle_dir: Path) -> None:
    run_dir = make_run(tmp_path / "run", num_steps=5000, pictures=False)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rows[3333]["private_bytes"] = 90 * MIB
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text, page = _render(run_dir, bundle_dir)
    assert len(text) < 600_000
    areas = [attrs["d"] for tag, attrs in page.tags if tag == "path" and attrs.get("class") == "area c1"]
    heights = [float(point.split()[1]) for point in str(areas[0]).removeprefix("M").split("L")]
    assert min(heights) < heights[0] - 80


@pytest.mark.parametrize("value", [0.0, -1.0, 5e-9, 3e12])
def test_one_step_of_any_size_is_drawn(run_dir: Path, bundle_dir: Path, value: float) -> None:
    row = dict.fromkeys(("seconds", "loss", "step_ms", "read_ms", "private_bytes", "file_bytes"), value)
    (run_dir / "metrics.jsonl").write_text(json.dumps({"step": 1, **row}) + "\n")
    _, page = _render(run_dir, bundle_dir)
    assert not any("nan" in path or "inf" in path for path in page.values("path", "d"))


def test_loss_spike_is_drawn_at_the_edge_and_counted(run_dir: Path, bundle_dir: Path) -> None:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rows[200]["loss"] = 50.0
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "drawn at its top edge: 1." in _render(run_dir, bundle_dir)[1].text


def test_picture_outside_the_run_is_not_embedded(run_dir: Path, bundle_dir: Path) -> None:
    _draw(run_dir / "secret.png", 1)
    item = {"prompt": "p", "seed": 0, "base": "../secret.png", "adapter": "adapter/none.png"}
    _edit(run_dir / "pictures/pictures.json", items=[item])
    _, page = _render(run_dir, bundle_dir)
    assert page.values("div", "class").count("gap") == 4  # in the header and in the grid


def test_large_picture_is_shrunk(run_dir: Path, bundle_dir: Path) -> None:
    noise = Image.effect_noise((1400, 1400), 90).convert("RGB")
    noise.save(run_dir / "pictures/base/p0_s0.png")
    assert len(_render(run_dir, bundle_dir)[0]) < 2_500_000


def test_peak_over_the_budget_is_said(run_dir: Path, bundle_dir: Path) -> None:
    _edit(run_dir / "run.json", budget_mib=32)
    assert "peak private memory 41 MiB, over its budget of 32 MiB." in _render(run_dir, bundle_dir)[1].text


@pytest.mark.parametrize("content", ["", "[]", '{"schema": "pocketdit.run/9"}'])
def test_unreadable_run_says_what_was_expected(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(ValueError, match="expected"):
        write_report(tmp_path, tmp_path)


def test_report_goes_where_it_is_told_and_leaves_no_temporary_file(run_dir: Path, bundle_dir: Path) -> None:
    path = bundle_dir / "page.html"
    assert write_report(run_dir, bundle_dir, path) == path
    assert not list(bundle_dir.glob("*.tmp"))


def test_summary_table_shows_numbers_or_dashes(run_dir: Path, tmp_path: Path) -> None:
    table = summary_table(run_dir)
    for text in (
        "400",
        "812",
        "41 MiB of 96 MiB",
        "12.3 GiB streamed",
        "412 MiB from",
        "0.31 base, 0.62 adapter",
    ):
        assert text in table
    assert "— base, — adapter" in summary_table(make_run(tmp_path / "bare", 0, "running", pictures=False))


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 0.18, [0, 0.05, 0.1, 0.15, 0.2]), (0, 96, [0, 20, 40, 60, 80, 100]), (3, 3, [3, 4, 5, 6])],
)
def test_ticks_step_by_one_two_or_five(low: float, high: float, ticks: list[float]) -> None:
    assert nice_ticks(low, high, 5 if high != 3 else 3) == pytest.approx(ticks)


def test_tick_texts_have_the_decimals_of_their_step() -> None:
    assert [format_tick(value, step) for value, step in ((0.1, 0.05), (1500, 500), (2e-9, 1e-9))] == [
        "0.10",
        "1,500",
        "2e-09",
    ]


def test_moving_mean_leaves_gaps_out() -> None:
    assert moving_mean([1.0, None, 3.0, 5.0], 3) == [1.0, None, 4.0, 4.0]
