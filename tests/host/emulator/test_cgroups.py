"""Control groups: version 1 for real where there is one, version 2 on a drawn tree of files."""

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from host.emulator import limits
from host.emulator.cgroups import (
    MOUNT,
    PREFIX,
    CgroupV1,
    CgroupV2,
    CgroupV2Scope,
    LimitRefusedError,
    delegated_parents,
    make_group,
    remove_stale,
)
from host.emulator.limits import Sampling, block_device, choose_group
from host.emulator.observe import cached_bytes, drop_page_cache

MIB = 1024**2
V2_FILES = ("memory.max", "memory.high", "memory.swap.max", "cpu.max", "io.max")


def can_use_v1() -> bool:
    try:
        CgroupV1().remove()
    except OSError:
        return False
    return True


needs_v1 = pytest.mark.skipif(not can_use_v1(), reason="no cgroup v1 for this user")


class Tree:
    """A folder that looks like a hierarchy of version 2: the kernel fills new groups with files, here a wrapper does."""

    def __init__(self, root: Path) -> None:
        self.root, self.files = root, V2_FILES
        self.fill(root)
        (root / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
        (root / "cgroup.subtree_control").write_text("memory\n")

    def fill(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True, parents=True)
        for name in ("cgroup.procs", "cgroup.subtree_control", *self.files):
            (folder / name).write_text("")
        (folder / "memory.stat").write_text("anon 5000\nfile 70\nshmem 24\n")
        (folder / "memory.events").write_text("low 0\nhigh 3\nmax 9\noom 2\noom_kill 1\n")
        (folder / "cpu.stat").write_text("usage_usec 10\nthrottled_usec 2500000\n")


@pytest.fixture
def tree(tmp_path, monkeypatch):
    made = Tree(tmp_path / "cgroup")

    def make(parent: Path, name: str = "") -> Path:
        folder = make_group(parent, name)
        made.fill(folder)
        return folder

    monkeypatch.setattr("host.emulator.cgroups.make_group", make)
    return made


def test_version_2_writes_limits_and_reads_counters(tree):
    group = CgroupV2(tree.root)
    (folder,) = tree.root.glob(f"{PREFIX}*")
    assert (tree.root / "cgroup.subtree_control").read_text() == "+io"  # the last of cpu and io that were off
    assert group.controllers == ("memory", "cpu", "io")
    assert group.entrances() == [folder / "cgroup.procs"]
    group.limit_memory(512 * MIB)
    group.limit_cpu(1.5)
    group.limit_flash("8:0", 2.1e9, None)
    assert (folder / "memory.max").read_text() == str(512 * MIB)
    assert (folder / "memory.high").read_text() == str(496 * MIB)
    assert (folder / "memory.swap.max").read_text() == "0"
    assert (folder / "cpu.max").read_text() == "150000 100000"
    assert (folder / "io.max").read_text() == "8:0 rbps=2100000000 wbps=max"
    group.limit_cpu(None)
    assert (folder / "cpu.max").read_text() == "max 100000"
    counters = group.counters()
    assert (counters.anon_bytes, counters.oom_kills, counters.limit_hits) == (5024, 1, 9)
    assert counters.throttled_seconds == 2.5


def test_version_2_goes_without_controllers_that_are_not_delegated(tree):
    tree.files = V2_FILES[:3]
    (tree.root / "cgroup.controllers").write_text("memory pids\n")
    group = CgroupV2(tree.root)
    assert group.controllers == ("memory",)
    assert group.missing == dict.fromkeys(("cpu", "io"), "not delegated to this group")
    assert group.counters().throttled_seconds is None
    (tree.root / "cgroup.controllers").write_text("pids\n")
    (tree.root / "cgroup.subtree_control").write_text("pids\n")
    with pytest.raises(OSError, match="not delegated"):
        CgroupV2(tree.root)


def test_version_2_is_chosen_where_memory_is_in_it(tree):
    group = choose_group(mount=tree.root)
    assert group.version == "cgroup v2"
    assert list(delegated_parents(tree.root))[-1] == tree.root


def test_a_hybrid_hierarchy_without_memory_in_version_2_is_version_1s(tmp_path):
    (tmp_path / "cgroup.controllers").write_text("hugetlb\n")
    group = choose_group(mount=tmp_path)
    assert isinstance(group, Sampling)
    assert group.missing["memory"] == f"no memory controller under {tmp_path}"


def test_a_user_whom_nothing_is_delegated_gets_a_scope_of_systemds(tree, tmp_path, monkeypatch):
    monkeypatch.setattr(limits.cgroups, "delegated_parents", lambda mount: iter(()))
    monkeypatch.setattr(limits.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(limits, "systemd_answers", lambda: True)
    group = choose_group(mount=tree.root)
    assert isinstance(group, CgroupV2Scope)
    first, second = group.command(), group.command()
    assert first[:3] == ["systemd-run", "--user", "--scope"]
    assert "--property=Delegate=yes" in first
    assert first != second  # a scope ends with its process
    name = f"{PREFIX}{os.getpid()}-2.scope"
    tree.fill(tree.root / "user" / name)
    (tree.root / "user" / name / "io.max").unlink()
    (tmp_path / "proc" / "77").mkdir(parents=True)
    scope = CgroupV2Scope(tree.root, tmp_path / "proc")
    scope.limit_memory(64 * MIB)  # not there yet
    (tmp_path / "proc" / "77" / "cgroup").write_text(f"0::/user/{name}\n")
    scope.adopt(77)
    scope.limit_memory(64 * MIB)
    assert (tree.root / "user" / name / "memory.max").read_text() == str(64 * MIB)
    assert scope.missing == {"io": "systemd does not delegate it to users here"}
    assert scope.counters().oom_kills == 1
    shutil.rmtree(tree.root / "user" / name)
    scope.limit_memory(2 * MIB)  # no longer there: nothing to limit, the last counts stay
    assert scope.counters().oom_kills == 1
    (tmp_path / "proc" / "77" / "cgroup").write_text("0::/session.slice\n")
    (tmp_path / "proc" / "77" / "stat").write_text("77 (systemd-run) Z 1")
    with pytest.raises(OSError, match=r"process 77 is in /session.slice, expected a scope pocketdit-emulate-"):
        scope.adopt(77)


def test_a_process_that_systemd_has_not_moved_yet_is_waited_for(tree, tmp_path):
    scope = CgroupV2Scope(tree.root, tmp_path / "proc")
    scope.command()
    place = tmp_path / "proc" / "77" / "cgroup"
    place.parent.mkdir(parents=True)
    place.write_text("0::/session.slice\n")
    (place.parent / "stat").write_text("77 (systemd-run) S 1")
    name = f"{PREFIX}{os.getpid()}-1.scope"
    tree.fill(tree.root / "user" / name)
    moves = threading.Timer(0.2, place.write_text, (f"0::/user/{name}\n",))
    moves.start()
    scope.adopt(77)
    moves.join()
    scope.limit_memory(64 * MIB)
    assert (tree.root / "user" / name / "memory.max").read_text() == str(64 * MIB)


def test_a_user_without_systemd_either_is_only_sampled_and_told_why(tree, monkeypatch):
    monkeypatch.setattr(limits.cgroups, "delegated_parents", lambda mount: iter(()))
    monkeypatch.setattr(limits.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(limits, "systemd_answers", lambda: False)
    group = choose_group(mount=tree.root)
    assert group.version == "sampling"
    assert "no group is delegated to this user" in group.missing["memory"]


def test_groups_of_emulators_that_are_gone_are_removed_and_others_stay(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    )
    gone, here, foreign = (
        tmp_path / f"{PREFIX}{done.stdout.strip()}",
        tmp_path / f"{PREFIX}{os.getpid()}",
        tmp_path / "other",
    )
    for folder in (gone, here, foreign):
        folder.mkdir()
    remove_stale(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([here, foreign])


def joined(group: CgroupV1, code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    def join() -> None:
        for entrance in group.entrances():
            entrance.write_text("0")

    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, preexec_fn=join, capture_output=True, text=True, check=False)


@needs_v1
def test_version_1_kills_what_holds_more_and_counts_it():
    group = CgroupV1()
    try:
        group.limit_memory(64 * MIB)
        assert joined(group, f"block = b'x' * ({32 * MIB})").returncode == 0
        assert joined(group, f"block = b'x' * ({128 * MIB})").returncode == -9
        counters = group.counters()
        assert counters.oom_kills == 1
        assert counters.limit_hits > 0
        group.limit_memory(256 * MIB)  # up again: a run that starts anew imports first
        assert joined(group, f"block = b'x' * ({128 * MIB})").returncode == 0
    finally:
        group.remove()
    assert not list(MOUNT.glob(f"*/{PREFIX}{os.getpid()}"))


@needs_v1
def test_version_1_refuses_a_limit_below_what_is_held():
    group = CgroupV1()
    code = f"import os, time; block = b'x' * ({64 * MIB}); print(1, flush=True); time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, preexec_fn=lambda: group.entrances()[0].write_text("0")
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        assert group.pids() == [process.pid]
        with pytest.raises(LimitRefusedError):
            group.limit_memory(16 * MIB)
    finally:
        group.remove()  # ends the process too
    assert process.wait() == -9


@needs_v1
def test_version_1_gives_no_more_cpu_than_asked_for():
    group = CgroupV1()
    if "cpu" not in group.controllers:
        pytest.skip(f"no cpu controller: {group.missing}")
    try:
        group.limit_cpu(0.2)
        code = "import time\nend = time.monotonic() + 1\nwhile time.monotonic() < end: pass\nprint(time.process_time())"
        assert 0.1 < float(joined(group, code).stdout) < 0.35
        assert group.counters().throttled_seconds > 0.3
    finally:
        group.remove()


@needs_v1
def test_version_1_slows_reads_of_flash_down(tmp_path):
    group, path = CgroupV1(), tmp_path / "file"
    device = block_device(tmp_path)
    try:
        if "blkio" not in group.controllers or device is None:
            pytest.skip(f"{tmp_path} lies on no block device, or there is no blkio controller")
        path.write_bytes(os.urandom(24 * MIB))
        group.limit_flash(device, 16 * MIB, None)
        assert drop_page_cache([path])
        assert cached_bytes([path]) == 0
        start = time.monotonic()
        joined(group, "import sys; open(sys.argv[1], 'rb').read()", path)
        assert 1.2 < time.monotonic() - start < 4
        assert cached_bytes([path]) == 24 * MIB
    finally:
        group.remove()
