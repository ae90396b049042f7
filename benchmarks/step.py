"""The training step of published sizes against PyTorch, side by side: `python -m benchmarks.step`. Writes results/step.json.

Ours and PyTorch's processes take turns, so that a busy moment meets both. Bundles are made once under --work-dir.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.synthetic import WORKS, kept_bundle
from host.model_costs import ModelCosts
from runtime.bundle import Bundle
from runtime.manifest import WeightFormat, read_manifest
from runtime.memory import MIB
from runtime.trainer import planned_private_bytes

RESULTS = Path(__file__).parent / "results"
ROWS: list[tuple[str, WeightFormat, int]] = [
    ("sana-0.6b", "fp32", 5),
    ("sana-0.6b", "int8", 5),
    ("sana-0.6b", "int4", 5),
    ("sana-1.6b", "fp32", 5),
    ("sana-1.6b", "int8", 5),
    ("flux.1-dev", "int8", 1),
]
"""Work, weights, optimizer steps measured in each round."""


def main() -> None:
    """Runs the rows that are asked for and prints a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work-dir", type=Path, default=Path("/tmp/pocketdit-benchmarks"))
    parser.add_argument("--only", help="work and weights, e.g. sana-0.6b:int8")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    rows = [row for row in ROWS if options.only in (None, f"{row[0]}:{row[1]}")]
    peers = {name for name, _, _ in rows if name != "flux.1-dev"}
    made: list[dict[str, Any]] = []
    runs: dict[str, list[dict[str, Any]]] = {}
    for _ in range(options.rounds):
        for name in sorted(peers):
            runs.setdefault(f"{name} PyTorch", []).append(_eager(name, "middle", options.threads))
        for name, weight_format, steps in rows:
            bundle = kept_bundle(name, weight_format, options.work_dir)
            runs.setdefault(f"{name} {weight_format}", []).append(measure_ours(bundle, steps, options.threads))
        if "sana-0.6b" in peers:
            runs.setdefault("sana-0.6b PyTorch, whole model at 512 px", []).append(
                _eager("sana-0.6b", "whole", options.threads)
            )
    for name, each in runs.items():
        row = {"name": name, "step_ms": statistics.median(run["step_ms"] for run in each)}
        row["peak_private_mib"] = max(run["peak_private_bytes"] for run in each) / MIB
        row["rounds"] = each
        work, _, how = name.partition(" ")
        if not how.startswith("PyTorch"):
            bundle = options.work_dir / f"{work}-{how}"
            row["planned_private_mib"] = planned_private_bytes(Bundle(bundle, verify_hashes=False)) / MIB
            row |= _plan_of(work, how)
            manifest = read_manifest(bundle)
            row["weights_mib"] = sum(manifest.files[block.file].bytes for block in manifest.blocks) / MIB
            if peer := runs.get(f"{work} PyTorch"):
                row["time_to_pytorch"] = row["step_ms"] / statistics.median(run["step_ms"] for run in peer)
        made.append(row)
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"system": platform.platform(), "cores": os.cpu_count(), "threads": options.threads},
        "versions": {name: metadata.version(name) for name in ("torch", "executorch", "diffusers", "peft")},
        "rows": made,
    }
    RESULTS.mkdir(exist_ok=True)
    if options.only is None:
        (RESULTS / "step.json").write_text(json.dumps(result, indent=1) + "\n")
    print(table(made))


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, as in README.md."""
    lines = [
        "| work | step | to PyTorch | private memory, peak | planned at export | by `plan` | weights on flash |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            row["name"],
            f"{row['step_ms']:.0f} ms",
            f"{row['time_to_pytorch']:.2f}x" if "time_to_pytorch" in row else "",
            f"{row['peak_private_mib']:.0f} MiB",
            *(
                f"{row[key]:.0f} MiB" if key in row else ""
                for key in ("planned_private_mib", "plan_mib", "weights_mib")
            ),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _plan_of(name: str, weight_format: str) -> dict[str, float]:
    work = WORKS[name]
    costs: ModelCosts = work.costs()
    return {"plan_mib": costs.phone_row(work.cut, weight_format).private_bytes / MIB}


def _eager(name: str, blocks: str, threads: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.eager", name, blocks, "--threads", str(threads)]
    return json.loads(_output(command, threads))


def measure_ours(bundle: Path, steps: int, threads: int, micro_batch: int = 1) -> dict[str, Any]:
    """Median step of `micro_batch` samples, peak memory and time split of a training in a process of its own; the first step
    is left out."""
    code = (
        "import json, sys, tempfile; from dataclasses import replace; from pathlib import Path\n"
        "from runtime.trainer import train; from runtime.manifest import read_manifest\n"
        "bundle = Path(sys.argv[1])\n"
        "settings = replace(read_manifest(bundle).training, steps=int(sys.argv[2]) + 1, accumulation=int(sys.argv[4]))\n"
        "rows = []\n"
        "with tempfile.TemporaryDirectory() as run:\n"
        "    train(bundle, Path(run), settings, threads=int(sys.argv[3]), on_step=rows.append)\n"
        "print(json.dumps(rows))"
    )
    arguments = [str(bundle), str(steps), str(threads), str(micro_batch)]
    rows = json.loads(_output([sys.executable, "-c", code, *arguments], threads))
    later = rows[1:]
    split = ("read_ms", "forward_ms", "backward_ms", "optimizer_ms")
    return {
        "step_ms": statistics.median(row["step_ms"] for row in later),
        "spread_ms": [min(row["step_ms"] for row in later), max(row["step_ms"] for row in later)],
        "peak_private_bytes": rows[-1]["peak_private_bytes"],
        "split": {name: statistics.median(row[name] for row in later) for name in split},
    }


def _output(command: list[str], threads: int) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:4])} failed:\n{done.stderr[-2000:]}")
    return done.stdout.splitlines()[-1]


if __name__ == "__main__":
    main()
