"""The whole of `pocketdit evaluate` on a tiny random model: what is drawn, kept, scored, written and refused."""

import gc
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file, save_file

from host.cli import main
from host.config import GenerateConfig
from host.evaluation import page as evaluation_page
from host.evaluation import pictures as drawing
from host.evaluation.compare import Evaluation, EvaluationRequest
from host.evaluation.page import score_table, write_page
from host.evaluation.prompts import UNRELATED, drift_prompts, subject_prompts
from host.evaluation.rows import score_backgrounds
from host.features import load_features
from host.models import ModelFolder
from host.subjects import Subject
from host.tiny_base import world
from host.tiny_base.backgrounds import BackgroundClassifier, backgrounds_of
from runtime.bundle import sha256_file
from runtime.manifest import (
    SCHEMA,
    BaseSpec,
    BundleManifest,
    CutSpec,
    LoraSpec,
    PhotoSpec,
    ProgramSpec,
    SampleSpec,
    SubjectSpec,
    TrainingSpec,
    write_manifest,
)
from runtime.trainer import ADAPTER
from tests.host.test_features import save_clip, save_vit
from tests.page_check import Page
from tests.tiny_models import PROMPT

QUICK = ["--seeds", "0,1", "--set", "generate.steps=1", "--set", "generate.image_side=32"]
PROMPTS = ("a {} in the snow", "a {} <b>on</b> fire & ice")
DRIFT = ("a red car", "an old man")


def make_run(folder: Path, model_dir: Path, photos_dir: Path) -> Path:
    """A run and its bundle as far as `evaluate` reads them, with a random adapter: no export, no training."""
    model, bundle, run = ModelFolder(str(model_dir)), folder / "bundle", folder / "thing"
    (bundle / "preview").mkdir(parents=True)
    run.mkdir()
    photos = []
    for number, path in enumerate(sorted(photos_dir.iterdir())):
        preview = f"preview/{number}.jpg"
        Image.open(path).convert("RGB").save(bundle / preview)
        photos.append(PhotoSpec(name=path.name, sha256=sha256_file(path), caption=PROMPT, preview=preview))
    layers = [f"transformer_blocks.{block}.{layer}" for block in (1, 2) for layer in ("attn1.to_q", "attn2.to_v")]
    rng = np.random.default_rng(0)
    adapter = {}
    for layer in layers:
        rows, columns = model.skeleton().get_submodule(layer).weight.shape
        for name, shape in (("lora_A", (2, columns)), ("lora_B", (rows, 2))):
            adapter[f"transformer.{layer}.{name}.weight"] = rng.standard_normal(shape, np.float32)
    save_file(adapter, run / ADAPTER)
    manifest = BundleManifest(
        schema=SCHEMA,
        created_by="a test",
        base=BaseSpec(family="sana", model=str(model_dir), sha256=model.sha256(), num_blocks=5),
        cut=CutSpec(head=1, tail=2),
        blocks=(),
        programs=ProgramSpec(file="none.pte", backend="portable", methods={}),
        loss_file="none.safetensors",
        lora=LoraSpec(rank=2, alpha=2.0, targets=("to_q", "to_v"), prefix="transformer", init_file="none.safetensors"),
        samples=SampleSpec(shards=(), count=0, dtype="fp32"),
        training=TrainingSpec(),
        subject=SubjectSpec(instance_prompt=PROMPT, photos=tuple(photos)),
        export={"image_side": 128},
    )
    write_manifest(bundle, manifest)
    (run / "run.json").write_text(json.dumps({"status": "complete", "bundle": str(bundle)}))
    return run


@pytest.fixture
def run_dir(sana_dir, photos_dir, tmp_path) -> Path:
    return make_run(tmp_path / "runs", sana_dir, photos_dir)


@pytest.fixture(scope="module", autouse=True)
def swept():
    """Each chunk collects garbage; what is there already, half a second of it, need not be looked at again and again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def dino(tmp_path_factory) -> Path:
    return save_vit(tmp_path_factory.mktemp("features") / "dino")


@pytest.fixture
def files(tmp_path, dino) -> list[str]:
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    (tmp_path / "drift.txt").write_text("\n\n".join(DRIFT) + "\n")
    return [
        "--prompts",
        str(tmp_path / "prompts.txt"),
        "--drift-prompts",
        str(tmp_path / "drift.txt"),
        *QUICK,
        "--features",
        str(dino),
    ]


@pytest.fixture
def drawn(monkeypatch) -> list[list[tuple[bool, str, int]]]:
    """The pictures drawn, a list a chunk: with an adapter or not, prompt, seed."""
    chunks: list[list[tuple[bool, str, int]]] = []
    draw = drawing.PictureStore._draw

    def watched(self, orders, label):
        chunks.append([(order.artist.adapter_sha256 is not None, order.prompt, order.seed) for order in orders])
        draw(self, orders, label)

    monkeypatch.setattr(drawing.PictureStore, "_draw", watched)
    return chunks


def scale_adapter(run_dir: Path, factor: float) -> None:
    tensors = load_file(run_dir / ADAPTER)
    save_file({name: value * np.float32(factor) for name, value in tensors.items()}, run_dir / ADAPTER)


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): sha256_file(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def evaluated(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "evaluation" / "evaluation.json").read_text(encoding="utf-8"))


def test_every_prompt_and_seed_is_drawn_scored_and_shown_and_nothing_else_is_touched(
    run_dir, files, dino, tmp_path, capsys
):
    before = contents(run_dir)
    clip = save_clip(tmp_path / "clip")
    assert main(["evaluate", str(run_dir), *files, "--features", str(clip)]) == 0
    printed = capsys.readouterr().out
    after = contents(run_dir)
    assert {name: digest for name, digest in after.items() if not name.startswith("evaluation/")} == before
    assert not [name for name in after if name.endswith(".partial")]

    made = evaluated(run_dir)
    assert [metric["title"] for metric in made["metrics"]] == ["DINO", "CLIP-I", "CLIP-T", "DINO", "CLIP-I"]
    assert [metric["measure"] for metric in made["metrics"]] == ["subject", "subject", "prompt", "drift", "drift"]
    prompts = [prompt.replace("{}", "sks thing") for prompt in PROMPTS]
    assert [(row["prompt"], row["seed"]) for row in made["pictures"]] == [(p, s) for p in prompts for s in (0, 1)]
    assert [(row["prompt"], row["seed"]) for row in made["drift"]] == [(p, s) for p in DRIFT for s in (0, 1)]
    for row in [*made["pictures"], *made["drift"]]:
        base, adapter = (np.asarray(Image.open(run_dir / "evaluation" / row[kind])) for kind in ("base", "adapter"))
        assert base.shape == (32, 32, 3)
        assert not np.array_equal(base, adapter)
    key = f"subject:{dino}"
    mean = np.mean([row["scores"][key]["adapter"] for row in made["pictures"]])
    assert made["summary"][key]["adapter"]["mean"] == pytest.approx(mean, abs=1e-5)
    difference = made["summary"][key]["difference"]
    assert difference["low"] <= difference["mean"] <= difference["high"]
    assert difference["pictures"] == 4
    row = made["drift"][1]
    pair = load_features(str(dino)).images(
        [Image.open(run_dir / "evaluation" / row[kind]) for kind in ("base", "adapter")]
    )
    assert row["scores"][f"drift:{dino}"] == pytest.approx(1 - pair[0] @ pair[1], abs=1e-5)
    assert made["runs"][0]["adapter_sha256"] == sha256_file(run_dir / ADAPTER)

    page = Page((run_dir / "evaluation" / "evaluation.html").read_text(encoding="utf-8"))
    assert len(page.values("img", "src")) == 3 + 2 * 8
    assert all(source.startswith("data:image/") for source in page.values("img", "src"))
    assert prompts[1] in page.text
    assert "There is one subject" in page.text
    for metric in made["metrics"]:
        found = made["summary"][metric["key"]]["adapter"]
        assert f"{found['mean']:.3f} [{found['low']:.3f}, {found['high']:.3f}]" in printed
        assert f"{found['mean']:.3f}" in page.text


def test_started_again_it_draws_only_what_it_has_not(run_dir, files, drawn, capsys):
    command = ["evaluate", str(run_dir), *files, "--seeds", "0"]
    assert main(command) == 0
    first = evaluated(run_dir)
    assert sum(map(len, drawn)) == 8
    drawn.clear()
    assert main(command) == 0
    assert drawn == []
    assert evaluated(run_dir) == first
    picture = run_dir / "evaluation" / first["pictures"][0]["base"]
    picture.write_bytes(picture.read_bytes()[:200])  # half a file
    assert main(command) == 0
    assert drawn == [[(False, "a sks thing in the snow", 0)]]
    drawn.clear()
    assert main([*command, "--seeds", "0,1"]) == 0
    assert sum(map(len, drawn)) == 8
    assert {seed for chunk in drawn for _, _, seed in chunk} == {1}
    drawn.clear()
    scale_adapter(run_dir, 2.0)
    assert main(command) == 0
    assert {adapter for chunk in drawn for adapter, _, _ in chunk} == {True}
    drawn.clear()
    assert main([*command, "--set", "generate.guidance=2"]) == 0
    assert sum(map(len, drawn)) == 8


def test_interrupted_it_keeps_what_it_drew(run_dir, files, drawn, monkeypatch, capsys):
    monkeypatch.setattr(drawing, "CHUNK", 3)
    watched = drawing.PictureStore._draw

    def interrupted(self, orders, label):
        if len(drawn) == 2:
            raise KeyboardInterrupt
        watched(self, orders, label)

    monkeypatch.setattr(drawing.PictureStore, "_draw", interrupted)
    command = ["evaluate", str(run_dir), *files, "--seeds", "0", "--json"]
    assert main(command) == 1
    stopped = capsys.readouterr()
    assert json.loads(stopped.out.splitlines()[-1])["status"] == "stopped"
    assert "the pictures drawn are kept, the same command goes on" in stopped.err
    assert not (run_dir / "evaluation" / "evaluation.json").exists()
    monkeypatch.setattr(drawing.PictureStore, "_draw", watched)
    assert main(command) == 0
    pictures = [picture for chunk in drawn for picture in chunk]
    assert len(pictures) == len(set(pictures)) == 8


def test_the_bases_pictures_are_drawn_once_for_all_runs_on_it(run_dir, files, drawn, tmp_path, capsys):
    other = Path(shutil.copytree(run_dir, tmp_path / "runs" / "other"))
    scale_adapter(other, 0.0)
    output = tmp_path / "runs" / "evaluation"
    runs, without_features = [str(run_dir), str(other), str(run_dir)], files[: files.index("--features")]
    assert main(["evaluate", *runs, *without_features, "--seeds", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["output"] == str(output)
    base = [picture for chunk in drawn for picture in chunk if not picture[0]]
    assert len(base) == len(set(base)) == 4
    made = json.loads((output / "evaluation.json").read_text())
    assert [run["name"] for run in made["runs"]] == ["thing", "other"]
    # The photos are the same, so these are not two subjects.
    assert list(made["by_subject"]) == ["thing"]
    assert {row["run"] for row in made["drift"] if row["scores"]["drift:lite2"] > 1e-4} == {"thing"}
    zeros = [row for row in [*made["pictures"], *made["drift"]] if row["run"] == "other"]
    assert len(zeros) == 4
    for row in zeros:
        base_picture, same = (np.asarray(Image.open(output / row[kind])) for kind in ("base", "adapter"))
        np.testing.assert_array_equal(base_picture, same)
    assert {row["scores"]["drift:lite2"] for row in zeros if "drift:lite2" in row["scores"]} == {0.0}


@pytest.fixture
def dataset(photos_dir, tmp_path) -> Path:
    folder = tmp_path / "dataset"
    shutil.copytree(photos_dir, folder / "thing7")
    (folder / "cup").mkdir()
    Image.new("RGB", (16, 16), "red").save(folder / "cup" / "00.jpg")
    prompts = "".join(
        f"'a {{0}} {{1}} {end}'.format(unique_token, class_token),\n" for end in ("in the snow", "in Rome")
    )
    (folder / "prompts_and_classes.txt").write_text(
        f"Classes\n\nsubject_name,class\nthing7,thing\ncup,cup\n\nPrompts\n\nObject Prompts\n\nprompt_list = [\n{prompts}]\n\n"
        f"Live Subject Prompts\n\nprompt_list = [\n{prompts}]\n"
    )
    return folder


def test_with_a_data_set_a_run_gets_the_prompts_class_and_photos_of_its_subject(run_dir, dataset, tmp_path, capsys):
    clip = save_clip(tmp_path / "clip")
    arguments = ["--dataset", str(dataset), *QUICK, "--seeds", "0", "--features", str(clip)]
    assert main(["evaluate", str(run_dir), *arguments]) == 0
    assert "thing: thing7, 2 prompts, 3 photos of the data set" in capsys.readouterr().out
    made = evaluated(run_dir)
    assert [(row["subject"], row["prompt"], row["scored"]) for row in made["pictures"]] == [
        ("thing7", "a sks thing in the snow", "a thing in the snow"),
        ("thing7", "a sks thing in Rome", "a thing in Rome"),
    ]
    assert [row["prompt"] for row in made["drift"]] == ["a photo of a cup", "a photo of a thing"]
    assert made["runs"][0]["photos"] == sorted(map(str, (dataset / "thing7").glob("*.png")))


def test_a_dry_run_checks_and_writes_nothing(run_dir, files, capsys):
    before = contents(run_dir)
    assert main(["evaluate", str(run_dir), *files, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {
        "status": "dry-run",
        "pictures": 16,
        "prompts": {"thing": [prompt.replace("{}", "sks thing") for prompt in PROMPTS]},
        "output": str(run_dir / "evaluation"),
    }
    assert contents(run_dir) == before


def test_without_prompts_those_of_the_settings_or_the_instance_prompt_are_drawn(run_dir, tmp_path, caplog, dataset):
    def drawn_by(*prompts: str, dataset_dir: Path | None = None) -> list[str]:
        config = GenerateConfig(prompts=prompts)
        request = EvaluationRequest(run_dirs=(run_dir,), output_dir=tmp_path, config=config, dataset_dir=dataset_dir)
        return [prompt.drawn for prompt in Evaluation(request).runs[0].prompts]

    assert drawn_by() == [PROMPT]
    assert drawn_by("a thing", "a {} there") == ["a thing", "a sks thing there"]
    assert "is ignored" not in caplog.text
    assert drawn_by("a thing", dataset_dir=dataset)[0] == "a sks thing in the snow"
    assert "generate.prompts is ignored: the prompts come from the data set" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{tmp}/nowhere"], "nowhere is not a run folder"),
        (["{run}", "--features", "no-model"], "Feature model 'no-model' is neither a folder here nor a hub id"),
        (["{run}", "--features", "{tmp}"], "config.json cannot be read"),
        (["{run}", "--dataset", "{tmp}/nowhere"], "there is no such folder"),
        (["{run}", "--dataset", "{dataset}"], "none of its 3 photos is in the data set (1 subjects, e.g. cup)"),
        (["{run}", "--prompts", "{tmp}/none.txt"], "none.txt cannot be read"),
        (["{run}", "--prompts", "{tmp}/empty.txt"], "empty.txt has no prompt. Write one a line"),
        (
            ["{run}", "--drift-prompts", "{tmp}/placeholder.txt"],
            "drift prompts: got {}, expected prompts that do not name",
        ),
        (["{run}", "--set", "generate.image_side=100"], "image_side: got 100, expected a multiple of 16"),
        (["{run}", "--set", "generate.stepz=1"], "unknown key 'generate.stepz'"),
        (["{without}"], "has no adapter yet (status 'complete')"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_drawn(run_dir, dataset, tmp_path, capsys, drawn, arguments, message):
    shutil.rmtree(dataset / "thing7")
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "placeholder.txt").write_text("a {} on the moon")
    without = Path(shutil.copytree(run_dir, tmp_path / "without"))
    (without / ADAPTER).unlink()
    places = {"run": run_dir, "tmp": tmp_path, "dataset": dataset, "without": without}
    filled = [re.sub(r"\{(\w+)\}", lambda found: str(places[found[1]]), argument) for argument in arguments]
    assert main(["evaluate", *filled]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert drawn == []
    assert not (run_dir / "evaluation").exists()


def test_no_run_is_refused(capsys):
    with pytest.raises(SystemExit) as error:
        main(["evaluate"])
    assert error.value.code == 2
    assert "the following arguments are required: run" in capsys.readouterr().err


def test_a_photo_that_went_missing_is_named(run_dir, files, capsys):
    (run_dir.parent / "bundle" / "preview" / "1.jpg").unlink()
    assert main(["evaluate", str(run_dir), *files, "--seeds", "0"]) == 2
    assert re.search(r"photo \S+1.jpg cannot be read .* Export the bundle, or get", capsys.readouterr().err)


# Prompts


def test_prompts_for_drift_never_name_the_subject():
    assert drift_prompts("a photo of sks dog", [], None, tiny=False) == UNRELATED
    assert "a horse on a meadow" not in drift_prompts("a photo of sks horse", [], None, tiny=False)
    tiny = drift_prompts("a 3d emoji of a trophy", [], None, tiny=True)
    assert len(set(tiny)) == len(set(backgrounds_of(tiny))) == 8
    assert None not in backgrounds_of(tiny)
    assert not [prompt for prompt in tiny for label in world.holdout() if f"of a {label} on" in prompt]


def test_prompts_for_drift_hold_the_subjects_own_class_however_many_there_are():
    subjects = [
        Subject(name=f"s{i}", class_words=f"class {i:02d}", photos_dir=Path(), prompts=("a {}",)) for i in range(40)
    ]
    for subject in (subjects[0], subjects[17], subjects[39]):
        found = drift_prompts("a photo of sks thing", subjects, subject, tiny=False)
        assert f"a photo of a {subject.class_words}" in found
        assert 15 <= len(found) <= 16


def test_a_prompt_given_twice_is_drawn_once():
    prompts = subject_prompts(["a {}", "a sks dog", "a {}"], "a photo of sks dog", None)
    assert [prompt.drawn for prompt in prompts] == ["a sks dog"]


# Rows and page


def test_only_prompts_that_name_a_background_are_scored_for_it(tmp_path):
    weight, bias = torch.zeros(2 * 3 * 64, 16), torch.zeros(16)
    bias[list(world.background_names()).index("the snow")] = 9.0
    classifier = BackgroundClassifier(weight=weight, bias=bias, accuracy=0.99, tested=100)
    Image.new("RGB", (128, 128)).save(tmp_path / "p.png")
    prompts = ("a 3d emoji of a cup on the snow", "a 3d emoji of a cup on the beach", "a cup")
    rows = [{"prompt": prompt, "base": "p.png", "adapter": "p.png", "scores": {}} for prompt in prompts]
    metrics = score_backgrounds(classifier, tmp_path, rows)
    assert [metric["key"] for metric in metrics] == ["prompt:background", "prompt:background-right"]
    assert [row["scores"].get("prompt:background-right", {}).get("base") for row in rows] == [1.0, 0.0, None]
    assert rows[0]["scores"]["prompt:background"]["adapter"] > 0.99


def make_evaluation(folder: Path, num_subjects: int = 3, num_prompts: int = 4, seeds: tuple[int, ...] = (0, 1)) -> dict:
    """An evaluation as `evaluation.json` has it, its pictures drawn here."""
    (folder / "pictures").mkdir(parents=True)
    rng = np.random.default_rng(0)
    keys = {"subject": ("subject:dino", "DINO"), "prompt": ("prompt:clip", "CLIP-T"), "drift": ("drift:dino", "DINO")}

    def picture(name: str) -> str:
        coarse = rng.integers(0, 255, (8, 8, 3), np.uint8)
        image = Image.fromarray(coarse).resize((128, 128), Image.Resampling.BICUBIC)
        image.save(folder / "pictures" / f"{name}.png")
        return f"pictures/{name}.png"

    def summary(mean: float) -> dict[str, Any]:
        return {"mean": mean, "low": mean - 0.04, "high": mean + 0.05, "subjects": num_subjects, "pictures": 8}

    def found() -> dict[str, Any]:
        pair = {"base": summary(0.31), "adapter": summary(0.52), "difference": summary(0.21)}
        return {key: {"adapter": summary(0.1)} if measure == "drift" else pair for measure, (key, _) in keys.items()}

    rows, drifted, runs = [], [], []
    for subject in (f"sks dog {i}" for i in range(num_subjects)):
        for number, seed in ((n, s) for n in range(num_prompts) for s in seeds):
            stem = f"{subject[-1]}-{number}-{seed}"
            names = {kind: picture(f"{stem}-{kind}") for kind in ("base", "adapter")}
            row = {"run": subject, "subject": subject, "seed": seed, "unseen": number > 0, **names}
            pair = {"base": 0.31, "adapter": 0.52}
            scored = {key: pair for measure, (key, _) in keys.items() if measure != "drift"}
            rows.append(row | {"prompt": f"a {subject} <i>in</i> place {number}", "scores": scored})
            if number == 0:
                drifted.append(row | {"prompt": "a photo of a cat", "scores": {"drift:dino": 0.1}})
        photos = [str(folder / names[kind]) for kind in ("base", "adapter")]
        runs.append({"name": subject, "subject": subject, "instance_prompt": f"a photo of {subject}", "photos": photos})
    return {
        "version": "0.1.0",
        "settings": {"seeds": list(seeds), "steps": 24},
        "intervals": {"level": 0.95},
        "features": [{"name": "someone/dino-vits16", "title": "DINO", "sha256": "5f" * 32}],
        "backgrounds": {"accuracy": 0.998, "tested": 2048},
        "metrics": [
            {"key": key, "measure": measure, "title": title, "source": "someone/a-model-with-a-long-name-vits16"}
            for measure, (key, title) in keys.items()
        ],
        "runs": runs,
        "summary": found(),
        "by_subject": {run["subject"]: found() for run in runs},
        "pictures": rows,
        "drift": drifted,
    }


def test_the_page_has_a_row_for_each_measure_and_subject_and_a_pair_for_each_prompt_and_seed(tmp_path):
    made = make_evaluation(tmp_path)
    page = Page(write_page(made, tmp_path).read_text(encoding="utf-8"))
    # Photos, pairs of the prompts, pairs for drift.
    assert len(page.values("img", "src")) == 3 * 2 + 2 * 24 + 2 * 6
    assert "3 subjects, 12 prompts, 2 seeds: 24 pictures each by base and adapter, 6 pairs for drift." in page.text
    assert "With fewer than 6 subjects the intervals are shorter than 95 % asks for." in page.text
    assert "a sks dog 0 <i>in</i> place 0" in page.text
    assert page.text.count("+0.210[+0.170, +0.260]") == 2 + 3 * 2
    assert "trained with" in page.text
    table = score_table(made)
    assert "Subject, DINO   0.310 [0.270, 0.360]  0.520 [0.480, 0.570]  +0.210 [+0.170, +0.260]" in table
    assert "Drift, DINO     —                     0.100 [0.060, 0.150]  —" in table


def test_a_large_evaluation_shows_every_subject_and_says_what_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation_page, "MAX_PAIRS", 20)
    made = make_evaluation(tmp_path, num_subjects=4, num_prompts=8)
    page = Page(write_page(made, tmp_path).read_text(encoding="utf-8"))
    assert "20 of 64 pairs are shown; the folder has all." in page.text
    assert len(page.values("img", "src")) == 4 * 2 + 2 * 20 + 2 * 8
    for subject in made["by_subject"]:
        assert subject in page.text
