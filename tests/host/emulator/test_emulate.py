"""The harness: what is measured, what ends a run, what is said about it. Runs under whatever limits this machine has."""

import json
import mmap

import pytest

from host.emulator import emulate as module
from host.emulator.device import load_device
from host.emulator.emulate import Request, emulate
from host.emulator.limits import EnforcementError, Sampling, choose_group
from host.emulator.recorder import thinned
from host.emulator.summary import summary_text
from runtime.trainer import ADAPTER
from tests.host.emulator.groups import groups_left
from tests.host.emulator.workloads import CHOICE, MIB

WORKLOADS = "tests.host.emulator.workloads"


def enforced() -> bool:
    group = choose_group()
    group.remove()
    return not isinstance(group, Sampling)


needs_cgroups = pytest.mark.skipif(not enforced(), reason="this machine gives no control group to this user")


@pytest.fixture
def sampled(monkeypatch):
    """As for a user without control groups."""
    monkeypatch.setattr(module, "choose_group", lambda **_: Sampling("no permission"))


@pytest.fixture
def work(bundle_dir, tmp_path, monkeypatch):
    """Emulates a small workload."""

    def run(choice: str, budget_mib: int = 64, **changes) -> dict:
        monkeypatch.setenv(CHOICE, choice)
        values = {"budget_bytes": budget_mib * MIB, "page_cache_bytes": 16 * MIB, "workload": WORKLOADS} | changes
        request = Request(bundle=bundle_dir, device=load_device("pixel-8"), run_dir=tmp_path / "run", **values)
        return emulate(request)

    yield run
    assert groups_left() == []


@pytest.mark.parametrize("choice", ["hold", "flash_past", "hold_in_a_child"])
def test_private_memory_is_that_of_the_whole_tree_and_short_peaks_count(work, choice):
    made = work(choice)
    assert made["verdict"] == "within", made["reason"]
    child = 10 if choice == "hold_in_a_child" else 0  # an interpreter of its own
    assert 40 * MIB <= made["peak"]["private_bytes"] < (42 + child) * MIB
    assert made["exit_status"] == 0
    assert made["breach"] is None


def test_the_kernels_figure_and_the_sampled_one_agree_within_5_percent(work):
    made = work("hold")
    if made["peak"]["kernel_anon_bytes"] is None:
        pytest.skip("no control group, so no figure of the kernel")
    assert made["peak"]["kernel_anon_bytes"] == pytest.approx(made["peak"]["total_private_bytes"], rel=0.05)


def test_shared_anonymous_memory_is_private_and_locked_pages_are_told(work):
    made = work("share")
    assert 48 * MIB <= made["peak"]["private_bytes"] < 50 * MIB
    assert made["enforcement"]["locked_bytes"] >= 24 * MIB


def test_pages_of_files_are_reported_and_not_gated(work):
    made = work("read_files", budget_mib=8, page_cache_bytes=64 * MIB)
    assert made["verdict"] == "within", made["reason"]
    assert made["peak"]["file_bytes"] - made["idle"]["file_bytes"] > 40 * MIB
    assert made["flash"]["written_bytes"] >= 48 * MIB


def test_pages_of_a_mapped_file_count_while_they_are_dirty(work):
    made = work("write_files", page_cache_bytes=64 * MIB)
    assert made["verdict"] == "within", made["reason"]
    assert made["peak"]["private_bytes"] >= 24 * MIB


@pytest.mark.parametrize("choice", ["hold", "hold_in_a_child"])
def test_a_breach_names_phase_block_and_step_and_ends_the_tree(work, choice):
    # The kernel's limit lies above what is held: on a busy machine it would come before the sampler.
    made = work(choice, budget_mib=20, page_cache_bytes=64 * MIB)
    place = {"hold": ("forward", 7, 3), "hold_in_a_child": ("load", None, 0)}[choice]
    assert (made["verdict"], made["exit_status"]) == ("over", 1)
    assert tuple(made["breach"][name] for name in ("phase", "block", "step")) == place
    assert made["breach"]["by"] == "sampler"
    assert made["breach"]["private_bytes"] > 20 * MIB
    assert "the budget is 20.0 MiB" in made["reason"]
    assert made["summary"]["seconds"] < 2
    assert "breach" in summary_text(made)


def test_sampling_alone_ends_a_breach_too_and_is_called_weaker(work, sampled):
    made = work("hold", budget_mib=20)
    assert (made["verdict"], made["breach"]["phase"]) == ("over", "forward")
    assert made["enforcement"]["memory"] == "sampling"
    assert made["enforcement"]["cpu"] == "none"
    assert made["enforcement"]["flash"] == "throttled reader"
    assert made["budget"]["kernel_limit_bytes"] is None
    assert any("no permission" in note for note in made["enforcement"]["notes"])
    assert "weaker" in summary_text(made)


@needs_cgroups
def test_what_is_too_fast_for_the_sampler_the_kernel_ends_at_its_limit(work):
    made = work("burst", budget_mib=20)
    assert made["exit_status"] == 1
    assert made["breach"]["phase"] == "checkpoint"
    assert made["peak"]["kernel_anon_bytes"] < 20 * MIB + made["budget"]["kernel_limit_bytes"]
    if made["breach"]["by"] == "kernel":
        assert made["verdict"] == "killed"
        assert made["kernel"]["oom_kills"] == 1


@needs_cgroups
def test_a_budget_in_all_holds_the_interpreter_and_the_page_cache_too(work):
    made = work("read_files", budget_bytes=None, page_cache_bytes=None, total_bytes=32 * MIB)
    assert made["verdict"] == "within", made["reason"]
    assert made["budget"]["kernel_limit_bytes"] == 32 * MIB
    assert made["peak"]["total_private_bytes"] < 32 * MIB
    assert made["kernel"]["limit_hits"] > 0
    assert made["peak"]["file_bytes"] < 32 * MIB  # the file is mapped and read whole, but not all of it can stay


def test_a_budget_below_the_interpreter_itself_is_over_before_anything_runs(work):
    made = work("hold", budget_bytes=None, page_cache_bytes=None, total_bytes=2 * MIB)
    assert (made["verdict"], made["exit_status"], made["breach"]["phase"]) == ("over", 1, "idle")
    assert "the interpreter and its libraries alone held" in made["reason"]


def test_a_process_that_ends_by_itself_is_a_failure_with_its_last_words(work):
    made = work("crash")
    assert (made["verdict"], made["exit_status"]) == ("failed", 1)
    assert (
        made["reason"] == "The process ended in phase 'optimizer', step 5 with exit status 7. It said: the last words"
    )


def test_training_keeps_within_a_budget_it_needs_and_not_within_less(bundle_dir, tmp_path):
    def run(budget: int) -> dict:
        request = Request(
            bundle=bundle_dir, device=load_device("pixel-8"), run_dir=tmp_path / "run", steps=4, budget_bytes=budget
        )
        return emulate(request)

    made = run(64 * MIB)
    assert made["verdict"] == "within", made["reason"]
    assert (tmp_path / "run" / ADAPTER).is_file()
    assert json.loads((tmp_path / "run" / "emulation.json").read_text()) == made
    phases = {made["phases"][row[4]] for row in made["samples"]}
    assert phases & {"forward", "backward", "checkpoint", "optimizer", "read", "loss"}
    assert [row["step"] for row in made["steps"]] == [1, 2, 3, 4]
    for row in made["steps"]:
        parts = sum(row[f"{name}_ms"] for name in ("read", "forward", "backward", "optimizer", "other"))
        assert parts == pytest.approx(row["step_ms"], rel=1e-6)
    assert made["flash"]["writes"]["checkpoints"] > 0
    assert made["flash"]["writes"]["adapter"] > 0
    assert made["projection"]["step_seconds"]["low"] > 0
    need = made["peak"]["private_bytes"]
    assert MIB < need < 8 * MIB
    assert run(round(1.25 * need))["verdict"] == "within"
    over = run(max(MIB, round(0.8 * need)))
    assert (over["verdict"], over["exit_status"]) == ("over", 1)


def test_what_a_killed_process_wrote_stands_under_what_it_was_for(bundle_dir, tmp_path):
    run_dir = tmp_path / "run"
    values = {"steps": 12, "faults": ("kill",), "seed": 0}  # after step 4, with two checkpoints written
    made = emulate(Request(bundle=bundle_dir, device=load_device("pixel-8"), run_dir=run_dir, **values))
    assert made["verdict"] == "within", made["reason"]
    assert made["faults"][0]["step"] == 4
    writes, size = made["flash"]["writes"], (run_dir / "checkpoints" / "step_000012.safetensors").stat().st_size
    # One every second step; the second is written twice if the kill came in the middle of it.
    assert 6 * size <= writes["checkpoints"] < 7 * (size + 2 * mmap.PAGESIZE)
    assert sum(writes.values()) == made["flash"]["written_bytes"]


def test_a_process_killed_while_it_writes_a_checkpoint_wrote_a_checkpoint(work):
    made = work("killed_in_a_checkpoint")
    assert made["verdict"] == "failed"
    writes = made["flash"]["writes"]
    assert (writes["checkpoints"], writes["adapter"]) == (24 * MIB, 8 * MIB)
    # A page more at most: what the process wrote before its work began.
    assert 0 <= writes["metrics"] - 16 * MIB <= 4 * mmap.PAGESIZE


def test_a_folder_that_no_emulation_made_is_left_alone(bundle_dir, tmp_path):
    (tmp_path / "mine").write_text("x")
    with pytest.raises(ValueError, match="is not empty and no emulation made it"):
        emulate(Request(bundle=bundle_dir, device=load_device("pixel-8"), run_dir=tmp_path))
    assert (tmp_path / "mine").read_text() == "x"


def test_required_enforcement_is_not_weakened(tmp_path):
    with pytest.raises(EnforcementError, match="no memory controller under"):
        choose_group(require=True, mount=tmp_path)
    assert isinstance(choose_group(mount=tmp_path), Sampling)


def test_thinning_keeps_the_peaks():
    rows = [(float(i), 7 if i == 4321 else 1, 0, None, 0, -1, 0) for i in range(10_000)]
    kept = thinned(rows, 100)
    assert len(kept) == 100
    assert rows[4321] in kept
