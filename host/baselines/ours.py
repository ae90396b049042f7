"""PocketDiT itself as a method: the export, then the ExecuTorch runtime in a process of its own, as a user runs them."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file

from host.baselines.base import Task, Trained
from host.config import PatchPolicy
from host.models.folder import load_lora
from runtime.metrics import read_metrics
from runtime.trainer import ADAPTER


@dataclass(frozen=True, kw_only=True, slots=True)
class Ours:
    """Patches that follow the noise, only the middle blocks trained, residuals for the rest."""

    title: str
    cut: tuple[int, int]
    """Blocks left out at the head and at the tail."""
    policy: PatchPolicy = "low-to-high"
    learning_rate: float = 1e-4

    def train(self, task: Task, work_dir: Path) -> Trained:
        """See `Method`; leaves `bundle/` and `run/` in `work_dir`.

        Raises:
            RuntimeError: Training failed; carries its last words.
        """
        bundle_dir, run_dir = work_dir / "bundle", work_dir / "run"
        exporter = task.exporter(bundle_dir, cut=self.cut, patch_policy=self.policy)
        exporter.run(lambda name, cached, seconds: None)
        command = [sys.executable, "-m", "host.cli", "train", str(bundle_dir), "--run", str(run_dir)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{self.title}: `train` ended with {done.returncode}: {done.stderr[-2000:]}")
        transformer = exporter.model.load("transformer")
        load_lora(exporter.model.adapter, transformer, run_dir / ADAPTER)
        return Trained(
            model=exporter.model,
            transformer=transformer,
            tensors=load_file(run_dir / ADAPTER),
            losses=[row["loss"] for row in read_metrics(run_dir)],
        )
