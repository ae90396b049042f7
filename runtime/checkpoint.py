"""Checkpoints of a run: the LoRA, both moments and the counters in one safetensors file, written atomically.

Reads and writes `checkpoints/step_000400.safetensors`. A run resumes bit for bit: a step depends on nothing else, since
the samples' order follows from the seed and the step.
"""

import json
import logging
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from runtime.adapter import LoraParameters
from runtime.errors import CheckpointError
from runtime.optimizer import AdamW
from runtime.tensor_file import tensors_crc32, write_tensor_file

SCHEMA = "pocketdit.checkpoint/1"
KEEP = 2

log = logging.getLogger(__name__)


def save_checkpoint(run_dir: Path, step: int, lora: LoraParameters, optimizer: AdamW, binding: dict[str, Any]) -> Path:
    """Writes the state after `step` updates, then deletes all but the newest two: never the other way round.

    Args:
        run_dir: The run.
        step: Updates done.
        lora: Parameters.
        optimizer: Moments.
        binding: What the state belongs to (bundle hash, settings); a resume with other values is refused.
    """
    path = run_dir / "checkpoints" / f"step_{step:06d}.safetensors"
    tensors = {"parameters": lora.flat, "exp_avg": optimizer.exp_avg, "exp_avg_sq": optimizer.exp_avg_sq}
    metadata = {
        "schema": SCHEMA,
        "step": str(step),
        "crc32": str(tensors_crc32(tensors)),
        "binding": json.dumps(binding, sort_keys=True),
    }
    write_tensor_file(path, tensors, metadata)
    for old in sorted(path.parent.glob("step_*.safetensors"))[:-KEEP]:
        old.unlink()
    return path


def load_latest(run_dir: Path, lora: LoraParameters, optimizer: AdamW, binding: dict[str, Any]) -> int:
    """Restores the newest complete checkpoint into `lora` and `optimizer`.

    Returns:
        The number of updates done; 0 if there is no checkpoint.

    Raises:
        CheckpointError: The checkpoint belongs to another bundle or other settings; the message names each difference.
    """
    for path in sorted((run_dir / "checkpoints").glob("step_*.safetensors"), reverse=True):
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in ("parameters", "exp_avg", "exp_avg_sq")}
        except (SafetensorError, OSError) as error:
            log.warning("%s is damaged (%s); trying the one before.", path, error)
            continue
        if metadata.get("schema") != SCHEMA or metadata.get("crc32") != str(tensors_crc32(tensors)):
            log.warning("%s has another schema or a wrong checksum; trying the one before.", path)
            continue
        _require_same(path, json.loads(metadata["binding"]), binding)
        lora.flat.copy_(tensors["parameters"])
        optimizer.exp_avg.copy_(tensors["exp_avg"])
        optimizer.exp_avg_sq.copy_(tensors["exp_avg_sq"])
        optimizer.step_count = int(metadata["step"])
        return optimizer.step_count
    return 0


def _require_same(path: Path, stored: dict[str, Any], current: dict[str, Any]) -> None:
    names = sorted(stored.keys() | current.keys())
    different = [
        f"{n}: {stored.get(n)!r} then, {current.get(n)!r} now" for n in names if stored.get(n) != current.get(n)
    ]
    if different:
        raise CheckpointError(
            f"{path} belongs to another run: {'; '.join(different)}. Use these settings or a new run folder."
        )
