"""How long exporting the programs of published sizes takes, and how large they are: `python -m benchmarks.programs`.

Every kind of block at full width, traced and lowered; how many blocks of a kind there are makes no difference. Writes
programs.json.
"""

import argparse
import json
import platform
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.step import RESULTS
from benchmarks.synthetic import WORKS, Work, make_methods
from export import lower
from runtime.manifest import WeightFormat

ROWS: list[tuple[str, WeightFormat]] = [
    ("sana-0.6b", "fp32"),
    ("sana-0.6b", "int8"),
    ("sana-0.6b", "int4"),
    ("sana-1.6b", "int8"),
    ("flux.1-dev", "int8"),
]


def main() -> None:
    """Exports all of them and prints a table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows = [
        {"name": f"{name} {weights}"} | measure(replace(WORKS[name], cut=(0, 0)), weights) for name, weights in ROWS
    ]
    result = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "system": platform.platform(), "rows": rows}
    (RESULTS / "programs.json").write_text(json.dumps(result, indent=1) + "\n")
    print("| programs | methods | wall time | processor time | file |\n|---|---|---|---|---|")
    for row in rows:
        cells = (f"{row['wall_s']:.0f} s", f"{row['processor_s']:.0f} s", f"{row['bytes'] / 1e3:.0f} kB")
        print(f"| {row['name']} | {row['methods']} | {' | '.join(cells)} |")


def measure(work: Work, weight_format: WeightFormat) -> dict[str, Any]:
    """Seconds of tracing and lowering every method, and the size of the file."""
    costs = work.costs()
    wall, processor = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / lower.FILE_NAME
        spec = lower.lower(make_methods(work, costs, weight_format), path, "xnnpack")
        size = path.stat().st_size
    return {
        "methods": len(spec.methods),
        "wall_s": time.perf_counter() - wall,
        "processor_s": time.process_time() - processor,
        "bytes": size,
    }


if __name__ == "__main__":
    main()
