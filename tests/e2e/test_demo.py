"""The README's first command's work: the whole path on the embedded model, at full length."""

import json
import subprocess
import sys
import time

import pytest

from host.demo import BUDGET_MIB
from host.emulator.limits import Sampling, choose_group
from host.tiny_base import subject


@pytest.mark.long
def test_the_demo_teaches_the_subject_within_its_time_and_budget(tmp_path):
    start = time.monotonic()
    command = [sys.executable, "-m", "host.cli", "demo", "--output", str(tmp_path / "demo"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - start < 360
    summary = json.loads(done.stdout.splitlines()[-1])["summary"]
    assert summary["steps"] == 400
    assert summary["last_loss"] < summary["first_loss"]
    assert summary["peak_private_bytes"] < BUDGET_MIB * 2**20
    run = tmp_path / "demo" / "run"
    pictures = json.loads((run / "pictures" / "pictures.json").read_text())
    assert len({item["prompt"] for item in pictures["items"]}) >= 4
    assert all(item["unseen"] for item in pictures["items"])
    assert not any(name in item["prompt"] for item in pictures["items"] for name in subject.BACKGROUNDS)
    assert pictures["similarity"]["adapter"] > pictures["similarity"]["base"] + 0.06
    better = [item["similarity_adapter"] > item["similarity_base"] for item in pictures["items"]]
    assert sum(better) >= 0.75 * len(better)
    assert (run / "report.html").stat().st_size > 100_000
    # The same bundle under the limits of the smallest phone; a budget below its need is noticed.
    bundle, group = tmp_path / "demo" / "bundle", choose_group()
    group.remove()
    flags = [] if isinstance(group, Sampling) else ["--require-enforcement"]
    for budget_mib, status, verdict in ((BUDGET_MIB, 0, "within"), (8, 1, "over")):
        command = [sys.executable, "-m", "host.cli", "emulate", str(bundle), "--device", "galaxy-a14", "--steps", "5"]
        command += ["--budget", f"{budget_mib}MiB", "--run", str(tmp_path / f"phone-{budget_mib}"), "--json", *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        assert json.loads(done.stdout.splitlines()[-1])["verdict"] == verdict
