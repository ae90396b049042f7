"""What narrow weights do to the loss and the LoRA's gradient, against float32: `python -m benchmarks.formats`.

SANA-0.6B's random weights, from the bundles of `benchmarks.step`, and the tiny base's trained ones; LoRA away from its start.
Writes results/formats.json.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.step import RESULTS
from benchmarks.synthetic import WORKS, kept_bundle
from host import tiny_base
from runtime.bundle import Bundle
from runtime.manifest import WeightFormat
from runtime.trainer import Trainer

FORMATS: tuple[WeightFormat, ...] = ("fp32", "fp16", "bf16", "int8", "int4")
NAMES = ("sana-0.6b", "tiny-base")
LORA_SCALE = 0.02


def main() -> None:
    """Prints a table of loss error, gradient cosine and bytes per parameter."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work-dir", type=Path, default=Path("/tmp/pocketdit-benchmarks"))
    options = parser.parse_args()
    result = {}
    for name in NAMES:
        rows: list[dict[str, Any]] = []
        exact: tuple[float, torch.Tensor] | None = None
        print(
            f"\n{name}\n| weights | bytes per parameter | loss, relative error | gradient, cosine |\n|---|---|---|---|"
        )
        for weight_format in FORMATS:
            bundle = Bundle(_bundle(name, weight_format, options.work_dir), verify_hashes=False)
            trainer = Trainer(bundle)
            trainer.lora.flat.normal_(0, LORA_SCALE, generator=torch.Generator().manual_seed(0))
            losses = trainer.accumulate([trainer.read(index) for index in range(len(trainer.samples))], 1.0)
            found = (sum(losses), trainer.lora.gradient)
            exact = exact or found
            row: dict[str, Any] = {
                "weights": weight_format,
                "loss_error": abs(found[0] - exact[0]) / exact[0],
                "gradient_cosine": float(torch.cosine_similarity(found[1].double(), exact[1].double(), dim=0)),
            }
            if name in WORKS:
                size = sum(bundle.manifest.files[block.file].bytes for block in bundle.manifest.blocks)
                row["bytes_per_parameter"] = size / sum(value.numel() for value in WORKS[name].middle_weights())
            rows.append(row)
            size_text = f"{row['bytes_per_parameter']:.3f}" if name in WORKS else ""
            print(
                f"| {weight_format} | {size_text} | {row['loss_error']:.1e} | {row['gradient_cosine']:.4f} |",
                flush=True,
            )
        result[name] = rows
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "formats.json").write_text(json.dumps(result, indent=1) + "\n")


def _bundle(name: str, weight_format: WeightFormat, work_dir: Path) -> Path:
    """Makes the bundle unless it is there."""
    if name in WORKS:
        return kept_bundle(name, weight_format, work_dir)
    folder = work_dir / f"{name}-{weight_format}"
    if (folder / "manifest.json").is_file():
        return folder
    home = Path(tiny_base.__file__).parent
    command = [sys.executable, "-m", "host.cli", "export", str(home / "sample_subject"), "-o", str(folder)]
    command += ["--config", str(home / "demo.toml"), "--weights", weight_format, "--set", "export.samples=64"]
    subprocess.run(command, check=True, capture_output=True)
    return folder


if __name__ == "__main__":
    main()
