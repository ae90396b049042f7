"""The whole path in one command, on the embedded base model and its sample subject. Writes a bundle and a run folder.

Each stage runs as its own process, as a user would run it, so that training's memory is training's alone.
"""

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from host.report import summary_table

EMBEDDED_DIR = Path(__file__).parent / "tiny_base"
SETTINGS, SUBJECT = EMBEDDED_DIR / "demo.toml", EMBEDDED_DIR / "sample_subject"
BUDGET_MIB = 24


def run_demo(output_dir: Path, *, steps: int | None, dry_run: bool, show: bool) -> dict[str, Any]:
    """Runs doctor, export, train, generate and report.

    Args:
        output_dir: Gets `bundle/` and `run/`.
        steps: Optimizer steps, None for the demo's own number.
        dry_run: Prints the commands only.
        show: Whether the commands may print.

    Returns:
        Seconds per stage, the run's summary, and the path of the report.

    Raises:
        ValueError: A stage failed; its own message went to the terminal.
    """
    bundle_dir, run_dir = output_dir / "bundle", output_dir / "run"
    config = ["--config", str(SETTINGS)]
    stages = {
        "doctor": [str(SUBJECT), "--min-side", "128"],
        "export": [str(SUBJECT), "-o", str(bundle_dir), *config],
        "train": [str(bundle_dir), "--run", str(run_dir), "--budget", str(BUDGET_MIB)]
        + (["--steps", str(steps)] if steps else []),
        "generate": [str(run_dir), *config],
        "report": [str(run_dir)],
    }
    seconds: dict[str, float] = {}
    for name, arguments in stages.items():
        if show:
            print(f"\n$ {shlex.join(['pocketdit', name, *arguments])}", flush=True)
        if dry_run:
            continue
        start = time.perf_counter()
        command = [sys.executable, "-m", "host.cli", name, *arguments]
        done = subprocess.run(command, stdout=None if show else subprocess.DEVNULL, check=False)
        if done.returncode:
            raise ValueError(f"the demo stopped at `{name}` (exit status {done.returncode}); its message is above.")
        seconds[name] = round(time.perf_counter() - start, 1)
    if dry_run:
        return {"status": "dry-run", "commands": {name: ["pocketdit", name, *args] for name, args in stages.items()}}
    run = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
    if show:
        print(
            f"\n{summary_table(run_dir)}\n\nLook at {(run_dir / 'report.html').resolve()} ({sum(seconds.values()):.0f} s)"
        )
    return {"status": "complete", "seconds": seconds, "summary": run["summary"], "report": str(run_dir / "report.html")}
