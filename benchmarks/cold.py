"""Training where the weights do not fit into memory: `python -m benchmarks.cold`. Needs root and cgroup v1; writes cold.json.

The process lives in a memory cgroup smaller than the weights and starts with none of them in the page cache, so every pass
reads flash. Compared with the bytes that have to be read, and with the longer of computing and reading.
"""

import argparse
import itertools
import json
import mmap
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.step import RESULTS
from benchmarks.synthetic import kept_bundle
from host.emulator.cgroups import CgroupV1
from host.emulator.observe import drop_page_cache
from runtime.manifest import read_manifest
from runtime.memory import MIB
from runtime.metrics import read_metrics


def main() -> None:
    """Measures five steps after a warm-up step, with the weights in the page cache and without, in turns, and the storage."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work-dir", type=Path, default=Path("/tmp/pocketdit-benchmarks"))
    parser.add_argument(
        "--limit-mib", type=int, default=768, help="of the whole process, interpreter and page cache included"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    bundle = kept_bundle("sana-0.6b", "fp32", options.work_dir)
    manifest = read_manifest(bundle)
    files = [bundle / block.file for block in manifest.blocks]
    weights = sum(path.stat().st_size for path in files)
    bandwidth = _bandwidth(files)
    runs: dict[str, list[dict[str, float]]] = {"warm": [], "cold": []}
    for _ in range(options.rounds):
        _bandwidth(files, direct=False)
        runs["warm"].append(_train(bundle, options.threads, None))
        drop_page_cache(files)
        runs["cold"].append(_train(bundle, options.threads, options.limit_mib))
    warm, cold = ({name: statistics.median(run[name] for run in each) for name in each[0]} for each in runs.values())
    bound_ms = max(warm["step_ms"], 1e3 * 2 * weights / bandwidth)
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "system": platform.platform(),
        "weights_mib": weights / MIB,
        "limit_mib": options.limit_mib,
        "storage_mib_per_s": bandwidth / MIB,
        "warm_step_ms": warm["step_ms"],
        "cold_step_ms": cold["step_ms"],
        "cold_to_bound": cold["step_ms"] / bound_ms,
        "read_to_twice_the_weights": cold["read_bytes"] / (2 * weights),
        "peak_private_mib": cold["peak_private_bytes"] / MIB,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "cold.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def _train(bundle: Path, threads: int, limit_mib: int | None) -> dict[str, float]:
    code = (
        "import sys; from dataclasses import replace; from pathlib import Path\n"
        "from runtime.manifest import read_manifest; from runtime.trainer import train\n"
        "settings = replace(read_manifest(Path(sys.argv[1])).training, steps=6)\n"
        "for entrance in sys.argv[4:]: Path(entrance).write_text('0')\n"
        "train(Path(sys.argv[1]), Path(sys.argv[2]), settings, threads=int(sys.argv[3]))"
    )
    group = None if limit_mib is None else CgroupV1()
    if group is not None and limit_mib is not None:
        group.limit_memory(limit_mib * MIB)
    try:
        with tempfile.TemporaryDirectory() as run:
            entrances = [] if group is None else map(str, group.entrances())
            command = [sys.executable, "-c", code, str(bundle), run, str(threads), *entrances]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"training failed ({done.returncode}): {done.stderr[-1500:]}")
            rows = read_metrics(Path(run))
    finally:
        if group is not None:
            group.remove()
    reads = [b["flash_read_bytes"] - a["flash_read_bytes"] for a, b in itertools.pairwise(rows)]
    return {
        "step_ms": statistics.median(row["step_ms"] for row in rows[1:]),
        "read_bytes": statistics.median(reads),
        "peak_private_bytes": rows[-1]["peak_private_bytes"],
    }


def _bandwidth(files: list[Path], *, direct: bool = True) -> float:
    """Bytes a second of reading the files once, in order, past the page cache or into it."""
    buffer = mmap.mmap(-1, 8 * MIB)
    start = time.perf_counter()
    for path in files:
        file = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        position = 0
        while position < path.stat().st_size:
            position += os.preadv(file, [buffer], position)
        os.close(file)
    return sum(path.stat().st_size for path in files) / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
