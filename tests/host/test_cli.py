"""The command line, called as a process."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from host.cli import _parser, main
from runtime.memory import MemoryWatch

ROOT = Path(__file__).parents[2]
COMMANDS = (
    "doctor",
    "profile",
    "export",
    "plan",
    "train",
    "emulate",
    "generate",
    "evaluate",
    "report",
    "convert",
    "demo",
)


def pocketdit(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "host.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def last_json(done: subprocess.CompletedProcess[str]) -> dict:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_each_command_has_an_example_and_at_most_eight_flags_of_its_own():
    subparsers = next(a for a in _parser()._actions if a.dest == "command").choices
    assert tuple(subparsers) == COMMANDS
    for name, parser in subparsers.items():
        flags = [a for a in parser._actions if a.option_strings and a.dest not in ("help", "json", "config", "set")]
        assert len(flags) <= 8, name
        assert f"example: pocketdit {name}" in parser.format_help()


def test_doctor_says_why_not_and_counts(tmp_path, photos_dir):
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 not a picture")
    (tmp_path / ".DS_Store").write_bytes(b"junk")
    (tmp_path / "ok.PNG").write_bytes((photos_dir / "photo 0.png").read_bytes())
    done = pocketdit("doctor", tmp_path, "--prompt", "x", "--min-side", 64)
    assert done.returncode == 0
    assert "broken.jpg" in done.stdout
    assert "1 of 2 accepted" in done.stdout
    result = last_json(pocketdit("doctor", tmp_path, "--prompt", "x", "--json"))
    assert result["accepted"] == 1
    assert {row["name"]: row["accepted"] for row in result["photos"]} == {"broken.jpg": False, "ok.PNG": True}


def test_the_path_by_command_ends_with_json_and_without_library_noise(tmp_path, sana_dir, photos_dir):
    bundle, run = tmp_path / "bundle", tmp_path / "run"
    settings = ["--set", "export.backend=portable", "--set", "export.sample_dtype=int8"]
    arguments = [
        photos_dir,
        "-o",
        bundle,
        "--model",
        sana_dir,
        "--prompt",
        "a thing",
        "--cut",
        "1,2",
        "--set",
        "export.samples=8",
    ]
    plan = last_json(pocketdit("export", *arguments, *settings, "--dry-run", "--json"))
    assert plan["plan"]["sample_bytes"] > 0
    assert not bundle.exists()
    done = pocketdit("export", *arguments, *settings, "--json")
    assert last_json(done)["stored_error"]["hidden"] > 0
    noise = [line for line in done.stderr.replace("\r", "\n").splitlines() if line.strip()]
    assert not [line for line in noise if not line.strip().startswith(("latents:", "residuals:"))], noise

    done = pocketdit("train", bundle, "--run", run, "--steps", 3, "--dry-run")
    assert "3 steps" in done.stdout
    assert not run.exists()
    done = pocketdit("train", bundle, "--run", run, "--steps", 3, "--budget", 64)
    assert done.stderr == ""
    assert "step 3/3 | loss" in done.stdout
    assert last_json(pocketdit("train", bundle, "--run", run, "--steps", 3, "--json"))["summary"]["steps"] == 3

    done = pocketdit(
        "generate", run, "--prompt", 'a thing <on> "fire" 🔥', "--seeds", "0", "--set", "generate.steps=2", "--json"
    )
    assert last_json(done)["items"][0]["seed"] == 0
    kohya, back, adapter = tmp_path / "kohya.safetensors", tmp_path / "peft.safetensors", run / "adapter.safetensors"
    assert last_json(pocketdit("convert", adapter, "-o", kohya, "--to", "kohya", "--json"))["family"] == "sana"
    last_json(pocketdit("convert", kohya, "-o", back, "--to", "peft", "--json"))
    assert back.read_bytes() == adapter.read_bytes()
    report = Path(last_json(pocketdit("report", run, "--json"))["report"])
    text = report.read_text(encoding="utf-8")
    assert "a thing &lt;on&gt;" in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "https://" not in text


def test_a_signal_stops_at_a_step_and_the_same_command_goes_on(tmp_path, bundle_dir):
    command = [
        sys.executable,
        "-m",
        "host.cli",
        "train",
        str(bundle_dir),
        "--run",
        str(tmp_path / "run"),
        "--steps",
        "500",
    ]
    process = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate()
    assert process.returncode == 1
    stopped = json.loads(output.splitlines()[-1])
    assert stopped["status"] == "stopped"
    steps = stopped["summary"]["steps"]
    assert 0 < steps < 500
    resumed = pocketdit("train", bundle_dir, "--run", tmp_path / "run", "--steps", steps + 2, "--json")
    assert last_json(resumed)["summary"]["steps"] == steps + 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["doctor", "nowhere"], "nowhere"),
        (["export", "nowhere", "-o", "out"], "nowhere"),
        (
            ["export", ".", "-o", "out", "--model", "no-such-model"],
            "'no-such-model' is neither a folder here nor a hub id",
        ),
        (["export", ".", "-o", "out", "--set", "export.smaples=3"], "unknown key 'export.smaples'"),
        (["train", "nowhere"], "nowhere is not a bundle"),
        (["generate", "nowhere"], "nowhere is not a run folder"),
        (["generate", "nowhere", "--dry-run"], "nowhere is not a run folder"),
        (["export", ".", "-o", "out", "--cut", "-1,3"], "cut: got (-1, 3), expected two numbers of blocks, 0 or more"),
        (["report", "nowhere"], "nowhere is not a run folder"),
        (["plan", "--model", "nowhere"], "'nowhere' is neither a folder here nor a hub id"),
        (["plan", "--weights", "int3"], "weights: got 'int3', expected one of fp32"),
        (["convert", "nowhere", "-o", "x", "--to", "kohya"], "nowhere is not a file"),
        (
            ["train", "{bundle}", "--set", "train.learning_rate=fast"],
            "train.learning_rate: got 'fast', expected a number",
        ),
        (["train", "{bundle}", "--config", "none.toml"], "none.toml: cannot be read as TOML"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_and_nothing_is_written(tmp_path, bundle_dir, arguments, message):
    arguments = [argument.format(bundle=bundle_dir) for argument in arguments]
    command = [sys.executable, "-m", "host.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_budget_below_the_plan_is_refused_and_a_measured_breach_stops(tmp_path, bundle_dir, monkeypatch, capsys):
    def greedy(watch: MemoryWatch) -> tuple[int, int]:
        watch.peak_private_bytes = 9 * 2**20
        return watch.peak_private_bytes, 0

    monkeypatch.setattr("host.cli._stop_on_signal", lambda: lambda: False)
    monkeypatch.setattr(MemoryWatch, "read", greedy)
    command = ["train", str(bundle_dir), "--steps", "2", "--budget", "8", "--run"]
    assert main([*command, str(tmp_path / "stopped")]) == 1
    assert "Step 1 held 9.0 MiB of private memory, the budget is 8 MiB. The state is saved" in capsys.readouterr().err

    monkeypatch.setattr("runtime.trainer.planned_private_bytes", lambda bundle: 9 * 2**20)
    for flags in ([], ["--dry-run"]):
        assert main([*command, str(tmp_path / "refused"), *flags]) == 2
        assert "takes at least 9 MiB of private memory, the budget is 8 MiB" in capsys.readouterr().err
    assert not (tmp_path / "refused").exists()


def test_a_dry_run_of_generate_refuses_what_generate_refuses(tmp_path, bundle_dir):
    run = tmp_path / "run"
    pocketdit("train", bundle_dir, "--run", run, "--steps", 1)
    done = pocketdit("generate", run, "--seeds", "0,1,2", "--dry-run", "--json")
    assert last_json(done)["image_side"] == 128
    assert not (run / "pictures").exists()
    done = pocketdit("generate", run, "--set", "generate.image_side=100", "--dry-run")
    assert done.returncode == 2
    assert "image_side: got 100, expected a multiple of 16" in done.stderr


def test_plan_says_what_a_model_takes_and_what_fits():
    rows = last_json(pocketdit("plan", "--cut", "4,3", "--weights", "fp32", "--json"))["rows"]
    assert [row["method"] for row in rows][:2] == ["phone: streamed", "GPU: LoRA"]
    assert rows[0]["cut"] == [4, 3]
    assert rows[0]["side"] == 64
    found = last_json(pocketdit("plan", "--budget", "3", "--weights", "fp32", "--patch", "64", "--json"))["fitting"]
    assert all(setting["row"]["private_bytes"] <= 3 * 2**20 for setting in found)
    assert pocketdit("plan", "--budget", "1").stdout == "Nothing fits 1 MiB.\n"


@pytest.mark.parametrize("value", ["0", "-5", "x"])
@pytest.mark.parametrize(
    "command",
    [["train", "b", "--threads"], ["doctor", "p", "--min-side"]],
)
def test_counts_below_one_are_refused(capsys, command, value):
    with pytest.raises(SystemExit) as error:
        main([*command, value])
    assert error.value.code == 2
    assert f"{command[-1]}: got '{value}', expected a whole number of at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "0.5", "-5", "x", "5 kB"])
@pytest.mark.parametrize("command", [["export", "p", "-o", "b"], ["train", "b"], ["plan"], ["emulate", "b"]])
def test_sizes_that_are_none_are_refused(capsys, command, value):
    if command[0] == "emulate" and value in ("0", "0.5"):
        pytest.skip("a size there is not whole MiB")
    with pytest.raises(SystemExit) as error:
        main([*command, "--budget", value])
    assert error.value.code == 2
    assert re.search("--budget: got '.*', expected a (size such as 512MiB|whole number)", capsys.readouterr().err)


def test_a_folder_that_cannot_be_written_is_said_in_one_line(bundle_dir, tmp_path):
    (tmp_path / "file").write_text("")
    done = pocketdit("train", bundle_dir, "--run", tmp_path / "file" / "run")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("pocketdit train: ")


def test_the_demos_dry_run_prints_each_command(tmp_path):
    result = last_json(pocketdit("demo", "--output", tmp_path / "demo", "--dry-run", "--json"))
    assert list(result["commands"]) == ["doctor", "export", "train", "generate", "report"]
    for command in result["commands"].values():
        _parser().parse_args(command[1:])
    assert list(tmp_path.iterdir()) == []
