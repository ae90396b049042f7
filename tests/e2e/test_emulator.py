"""`pocketdit emulate` as a user calls it: within, over, faults, leaks, Ctrl-C; at published width in the long tests."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.synthetic import SANA_06B, Work, make_bundle
from host.emulator.device import load_device
from host.emulator.emulate import Request, emulate
from host.emulator.faults import KINDS
from host.emulator.limits import Sampling, choose_group
from runtime.errors import StorageFullError
from runtime.manifest import TrainingSpec
from runtime.metrics import read_metrics
from runtime.trainer import ADAPTER, train
from tests.host.emulator import joint_graph
from tests.host.emulator.groups import groups_left

ROOT = Path(__file__).parents[2]
MIB = 1024**2
LEAK = (
    "            losses.append(loss)\n",
    '            losses.append(loss)\n            LEAKED.append(b"x" * (4 << 20))\n',
)


def pocketdit(*arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "host.cli", "emulate", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(cwd)}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=environment)


def test_a_bundle_within_its_budget_a_summary_and_two_files(bundle_dir, tmp_path):
    run, group = tmp_path / "run", choose_group()
    group.remove()
    flags = [] if isinstance(group, Sampling) else ["--require-enforcement"]
    done = pocketdit(bundle_dir, "--device", "pixel-8", "--budget", "64MiB", "--steps", 3, "--run", run, *flags)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "WITHIN: 3 steps held at most" in done.stdout
    assert len(done.stdout.splitlines()) < 25
    made = json.loads((run / "emulation.json").read_text())
    assert made["schema"] == "pocketdit.emulation/1"
    assert made["budget"]["basis"] == "--budget"
    assert made["enforcement"]["memory"] == group.version
    assert (run / "emulation.html").is_file()
    assert groups_left() == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--device", "brick"], "device: got 'brick', which is no known device"),
        (["--device", "pixel-8", "--faults", "flood"], "--faults: got 'flood', expected some of kill"),
        (["--device", "pixel-8", "--budget", "64", "--budget-total", "900"], "--budget-total: got --budget"),
        (["--device", "pixel-8", "--budget", "0"], "expected at least that"),
    ],
)
def test_what_cannot_run_is_said_in_one_line_with_status_2(bundle_dir, tmp_path, flags, message):
    done = pocketdit(bundle_dir, *flags, "--run", tmp_path / "run")
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_leak_planted_in_a_copy_of_the_runtime_is_caught(bundle_dir, tmp_path):
    copy = tmp_path / "copy"
    for package in ("runtime", "host"):
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("tiny_base", "__pycache__"))
    trainer = copy / "runtime" / "trainer.py"
    text = trainer.read_text()
    assert text.count(LEAK[0]) == 1
    trainer.write_text(text.replace(*LEAK) + "\n\nLEAKED: list[bytes] = []\n")
    flags = ["--device", "pixel-8", "--budget", "48MiB", "--steps", 12, "--run", tmp_path / "run", "--json"]
    done = pocketdit(bundle_dir, *flags, cwd=copy)
    made = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, made["verdict"]) == (1, "over"), done.stderr
    assert 4 < made["breach"]["step"] < 9  # 8 MiB a step: two samples
    assert made["breach"]["phase"] in ("loss", "forward", "read", "backward")


def test_kill_and_low_memory_lose_nothing(bundle_dir, tmp_path):
    flags = ["--device", "pixel-8", "--faults", "kill,low-memory", "--steps", 8, "--run", tmp_path / "run", "--json"]
    done = pocketdit(bundle_dir, *flags)
    made = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, made["verdict"]) == (0, "within"), (made["reason"], made["faults"])
    assert [(fault["kind"], fault["recovered"]) for fault in made["faults"]] == [("kill", True), ("low-memory", True)]
    assert made["adapter_equals_undisturbed"] is True
    traces = [
        [row["loss"] for row in read_metrics(run)] for run in (tmp_path / "run", tmp_path / "run" / "undisturbed")
    ]
    assert traces[0] == traces[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_the_emulator_ends_the_process_and_leaves_no_group(bundle_dir, tmp_path, number):
    run = tmp_path / "run"
    command = [sys.executable, "-m", "host.cli", "emulate", str(bundle_dir), "--device", "pixel-8", "--steps", "5000"]
    parent = subprocess.Popen(
        [*command, "--run", str(run)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # as a shell starts a job in the background
    )
    metrics, end = run / "metrics.jsonl", time.monotonic() + 60
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < end:
        time.sleep(0.05)
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    assert len(children) == 1
    parent.send_signal(number)
    _, errors = parent.communicate(timeout=30)
    if number == signal.SIGKILL:
        end = time.monotonic() + 10
        while Path(f"/proc/{children[0]}").exists() and time.monotonic() < end:
            time.sleep(0.05)
        choose_group().remove()  # the next emulator clears up after one that could not
    else:
        assert parent.returncode == 1
        assert b"stopped; the process was ended and its limits removed" in errors
    assert not Path(f"/proc/{children[0]}").exists()
    assert groups_left() == []
    assert json.loads((run / "emulation.json").read_text())["reason"] == "The emulation did not end."


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting takes root")
def test_a_disk_that_is_really_full_stops_with_a_reason_and_the_run_goes_on(bundle_dir, tmp_path):
    settings = TrainingSpec(steps=6, accumulation=2, learning_rate=1e-2, checkpoint_every=1, warmup_steps=2)
    train(bundle_dir, tmp_path / "straight", settings)
    size = (tmp_path / "straight" / "checkpoints" / "step_000006.safetensors").stat().st_size
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size + 40_000}", "none", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mounting is not allowed here: {mounted.stderr.decode().strip()}")
    try:
        with pytest.raises(StorageFullError, match=r"step_\d+.safetensors was not written: the storage is full"):
            train(bundle_dir, disk / "run", settings)
        assert not list(disk.glob("**/*.partial"))
        done = len(read_metrics(disk / "run"))
        assert 1 <= done < 6
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        train(bundle_dir, disk / "run", settings)
        assert (disk / "run" / ADAPTER).read_bytes() == (tmp_path / "straight" / ADAPTER).read_bytes()
        assert read_metrics(disk / "run")[-1]["loss"] == read_metrics(tmp_path / "straight")[-1]["loss"]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.long
def test_every_fault_one_after_the_other_loses_nothing(bundle_dir, tmp_path):
    made = emulate(
        Request(bundle=bundle_dir, device=load_device("pixel-8"), run_dir=tmp_path / "run", steps=24, faults=KINDS)
    )
    assert made["verdict"] == "within", (made["reason"], made["faults"], made["fault_seed"])
    assert [fault["kind"] for fault in made["faults"]] == list(KINDS)
    assert all(fault["recovered"] for fault in made["faults"])
    assert made["adapter_equals_undisturbed"] is True


# `nobody` may read what root can, since the interpreter and the bundle lie in root's folders, and write to nothing of root's.
ORDINARY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
READING = (
    "--inh-caps=-all,+dac_read_search",
    "--ambient-caps=+dac_read_search",
    "--bounding-set=-all,+dac_read_search",
)


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        (["--budget", "64MiB"], 0, "WITHIN: 3 steps held at most"),
        (["--budget", "1MiB"], 1, "the budget is 1.0 MiB"),
        (["--budget", "64MiB", "--require-enforcement"], 2, "the kernel's limits cannot be had (cgroup"),
    ],
)
def test_an_ordinary_user_without_control_groups_is_sampled_and_told_so(bundle_dir, tmp_path, flags, status, said):
    run = tmp_path / "run"
    run.mkdir()
    os.chown(run, 65534, 65534)
    command = [
        sys.executable,
        "-m",
        "host.cli",
        "emulate",
        bundle_dir,
        "--device",
        "pixel-8",
        "--steps",
        3,
        "--run",
        run,
    ]
    environment = os.environ | {"HOME": str(run), "TMPDIR": str(run), "PYTHONPATH": str(ROOT)}
    whole = [*ORDINARY, *READING, "--", *map(str, command), *flags]
    done = subprocess.run(whole, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert done.returncode == status, done.stderr
    if status == 2:
        assert said in done.stderr
        assert list(run.iterdir()) == []  # refused before anything was written
        return
    assert said in done.stdout, done.stdout
    enforcement = json.loads((run / "emulation.json").read_text())["enforcement"]
    assert [enforcement[name] for name in ("memory", "cpu", "flash")] == ["sampling", "none", "throttled reader"]
    assert "permission denied" in enforcement["notes"][0]
    assert (run / "emulation.json").stat().st_uid == 65534


@pytest.fixture(scope="module")
def sana_dir_06b(tmp_path_factory) -> Path:
    """Two blocks of SANA-0.6B's width, fp32."""
    folder = tmp_path_factory.mktemp("sana") / "two-blocks"
    config = SANA_06B | {"num_layers": 4}
    make_bundle(Work(config=config, cut=(1, 1), prompt_tokens=300, latent_factor=32), "fp32", folder)
    return folder


def budgeted(bundle: Path, run: Path, budget_mib: int, **changes: Any) -> dict[str, Any]:
    device = load_device("pixel-9-pro")
    return emulate(
        Request(bundle=bundle, device=device, run_dir=run, budget_bytes=budget_mib * MIB, **({"steps": 3} | changes))
    )


@pytest.mark.long
def test_ten_runs_peak_within_3_percent_and_the_kernel_agrees_within_5(sana_dir_06b, tmp_path):
    runs = [budgeted(sana_dir_06b, tmp_path / "run", 96) for _ in range(10)]
    assert {made["verdict"] for made in runs} == {"within"}
    peaks = sorted(made["peak"]["private_bytes"] for made in runs)
    assert peaks[-1] <= 1.03 * peaks[0], [round(peak / MIB, 2) for peak in peaks]
    if runs[0]["enforcement"]["memory"] != "sampling":
        for made in runs:
            kernel, total = made["peak"]["kernel_anon_bytes"], made["peak"]["total_private_bytes"]
            assert kernel == pytest.approx(total, rel=0.05)


@pytest.mark.long
def test_a_joint_graph_breaches_the_budget_that_the_block_programs_keep(sana_dir_06b, tmp_path):
    weights = joint_graph.export_joint(sana_dir_06b / joint_graph.FILE_NAME, 2)
    blocks = sum(path.stat().st_size for path in (sana_dir_06b / "blocks").glob("00*.safetensors"))
    assert 0.5 < weights / blocks < 2  # about as many weights as the bundle's two blocks have
    product = budgeted(sana_dir_06b, tmp_path / "product", 96)
    assert product["verdict"] == "within", product["reason"]
    joint = budgeted(sana_dir_06b, tmp_path / "run", 96, workload="tests.host.emulator.joint_graph")
    assert joint["verdict"] in ("over", "killed"), joint["peak"]
    assert joint["exit_status"] == 1
    assert joint["breach"]["phase"] in ("load", "forward")
    roomy = budgeted(sana_dir_06b, tmp_path / "run", 512, workload="tests.host.emulator.joint_graph")
    assert roomy["verdict"] == "within", roomy["reason"]  # the budget was the reason
    assert roomy["peak"]["private_bytes"] > 2 * product["peak"]["private_bytes"]
