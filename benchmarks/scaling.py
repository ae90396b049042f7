"""How time and memory of a step grow with depth, tokens and micro-batch: `python -m benchmarks.scaling`.

Blocks of SANA-0.6B's width with random int8 weights. Writes results/scaling.json and a page with the plots, scaling.html.
"""

import argparse
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.step import RESULTS, measure_ours
from benchmarks.synthetic import SANA_06B, WORKS, make_bundle
from host import page
from host.charts import Series, line_chart
from runtime.bundle import Bundle
from runtime.memory import MIB
from runtime.trainer import planned_private_bytes

DEPTHS = (2, 4, 8, 14)
SIDES = (128, 256, 384, 512)
MICRO_BATCHES = (1, 2, 4, 8)
TOKEN_SIDE = 32
"""Pixels of a token along one side: the autoencoder's factor."""
DEFAULT_DEPTH, DEFAULT_SIDE = 4, 256


def main() -> None:
    """Makes a bundle per depth and side, measures each, prints the rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        shapes = [(depth, DEFAULT_SIDE) for depth in DEPTHS] + [(DEFAULT_DEPTH, side) for side in SIDES]
        for depth, side in dict.fromkeys(shapes):
            bundle = Path(folder) / f"{depth}-{side}"
            config = SANA_06B | {"num_layers": depth}
            work = replace(WORKS["sana-0.6b"], config=config, cut=(0, 0), patch_side=side)
            make_bundle(work, "int8", bundle, samples=max(MICRO_BATCHES))
            is_default = (depth, side) == (DEFAULT_DEPTH, DEFAULT_SIDE)
            for micro_batch in MICRO_BATCHES if is_default else (1,):
                found = measure_ours(bundle, options.steps, options.threads, micro_batch)
                row = {
                    "depth": depth,
                    "tokens": (side // TOKEN_SIDE) ** 2,
                    "micro_batch": micro_batch,
                    "step_ms": found["step_ms"],
                    "spread_ms": found["spread_ms"],
                    "peak_private_mib": found["peak_private_bytes"] / MIB,
                    "planned_private_mib": planned_private_bytes(Bundle(bundle), micro_batch) / MIB,
                }
                rows.append(row)
                print(json.dumps(row), flush=True)
    (RESULTS / "scaling.json").write_text(json.dumps({"threads": options.threads, "rows": rows}, indent=1) + "\n")
    (RESULTS / "scaling.html").write_text(_page(rows))


def _page(rows: list[dict[str, Any]]) -> str:
    default = {"depth": DEFAULT_DEPTH, "tokens": (DEFAULT_SIDE // TOKEN_SIDE) ** 2, "micro_batch": 1}
    sections = []
    for key, label in (("depth", "trained blocks"), ("tokens", "image tokens"), ("micro_batch", "samples of a pass")):
        varied = sorted(
            (row for row in rows if all(row[other] == value for other, value in default.items() if other != key)),
            key=lambda row: row[key],
        )
        fixed = ", ".join(f"{other.replace('_', '-')} {value}" for other, value in default.items() if other != key)

        def curve(name: str, value: str, style: Any, color: str, varied: Any = varied, key: str = key) -> Series:
            return Series(label=name, points=[(row[key], row[value]) for row in varied], style=style, color=color)

        time = [curve("measured, median", "step_ms", "area", "c1")]
        memory = [
            curve("measured, peak", "peak_private_mib", "area", "c2"),
            curve("planned", "planned_private_mib", "steps", "c1"),
        ]
        charts = page.plate(line_chart(time, title=f"time by {label}", x_label=label, y_label="ms a step"))
        charts += page.plate(line_chart(memory, title=f"memory by {label}", x_label=label, y_label="private MiB"))
        sections.append(page.section(key, label.capitalize(), f"With {fixed}.", charts))
    body = "<header><h1>How a step grows</h1></header>" + "".join(sections)
    return page.document(title="How a step grows", kind="benchmark", body=body, footer="python -m benchmarks.scaling")


if __name__ == "__main__":
    main()
