"""What narrow weights do to the loss and the LoRA's gradient, against float32: `python -m benchmarks.formats`.

Uses the bundles of `benchmarks.step`; random weights, LoRA away from its start. Writes results/formats.json.
"""

import argparse
import json
from pathlib import Path

import torch

from benchmarks.step import RESULTS
from benchmarks.synthetic import WORKS, make_bundle
from runtime.bundle import Bundle
from runtime.trainer import Trainer

FORMATS = ("fp32", "fp16", "bf16", "int8", "int4")


def main() -> None:
    """Prints a table of loss error, gradient cosine and bytes per parameter."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work-dir", type=Path, default=Path("/tmp/pocketdit-benchmarks"))
    parser.add_argument("--work", default="sana-0.6b", choices=WORKS)
    options = parser.parse_args()
    rows, exact = [], None
    print("| weights | bytes per parameter | loss, relative error | gradient, cosine |\n|---|---|---|---|")
    for weight_format in FORMATS:
        folder = options.work_dir / f"{options.work}-{weight_format}"
        if not (folder / "manifest.json").is_file():
            make_bundle(WORKS[options.work], weight_format, folder)
        bundle = Bundle(folder, verify_hashes=False)
        trainer = Trainer(bundle)
        trainer.lora.flat.normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
        losses = trainer.accumulate([trainer.read(index) for index in range(len(trainer.samples))], 1.0)
        found = (sum(losses), trainer.lora.gradient)
        exact = exact or found
        size = sum(bundle.manifest.files[block.file].bytes for block in bundle.manifest.blocks)
        row = {
            "weights": weight_format,
            "bytes_per_parameter": size / sum(value.numel() for value in WORKS[options.work].middle_weights()),
            "loss_error": abs(found[0] - exact[0]) / exact[0],
            "gradient_cosine": float(torch.cosine_similarity(found[1], exact[1], dim=0)),
        }
        rows.append(row)
        numbers = f"{row['bytes_per_parameter']:.3f} | {row['loss_error']:.1e} | {row['gradient_cosine']:.5f}"
        print(f"| {weight_format} | {numbers} |", flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "formats.json").write_text(json.dumps({"work": options.work, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
