"""The published sizes with random weights: exports, and takes real steps through the runtime."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from accelerate import init_empty_weights
from safetensors.torch import save_file

from runtime.manifest import read_manifest
from runtime.metrics import read_metrics
from tests.tiny_models import PROMPT, save_flux, save_sana_with_gemma

pytestmark = pytest.mark.long

SANA_06B: dict[str, Any] = {
    "num_attention_heads": 36,
    "num_cross_attention_heads": 16,
    "cross_attention_head_dim": 72,
    "cross_attention_dim": 1152,
    "num_layers": 28,
}
SANA_16B: dict[str, Any] = {"num_layers": 20}
# One block of each kind at full width; the other 55 would be the same programs.
FLUX: dict[str, Any] = {"num_layers": 1, "num_single_layers": 1, "guidance_embeds": True}


def save_transformer(folder: Path, kind: str, config: dict[str, Any]) -> None:
    """Writes random float16 weights one shard a block, so that the whole never lies in memory."""
    with init_empty_weights():
        transformer = getattr(diffusers, kind)(**config)
    transformer.save_config(folder)
    shards: dict[str, list[str]] = {}
    for name in transformer.state_dict():
        parts = name.split(".")
        shards.setdefault(".".join(parts[:2]) if parts[0].endswith("blocks") else "rest", []).append(name)
    generator = torch.Generator().manual_seed(0)
    for shard, names in shards.items():
        tensors = {
            n: torch.empty(transformer.state_dict()[n].shape).uniform_(-0.03, 0.03, generator=generator).half()
            for n in names
        }
        save_file(tensors, folder / f"{shard}.safetensors")
    index = {name: f"{shard}.safetensors" for shard, names in shards.items() for name in names}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def save_model(folder: Path, name: str) -> Path:
    """A tiny model of the family whose transformer has the published size."""
    if name == "flux":
        save_flux(folder, joint_attention_dim=24, pooled_projection_dim=20)
        config = FLUX | {"joint_attention_dim": 24, "pooled_projection_dim": 20}
        kind = "FluxTransformer2DModel"
    else:
        save_sana_with_gemma(folder, {"caption_channels": 24})
        config = (SANA_06B if name == "sana-0.6b" else SANA_16B) | {"caption_channels": 24, "in_channels": 16}
        config |= {"out_channels": 16, "sample_size": 16, "interpolation_scale": 1.0}
        kind = "SanaTransformer2DModel"
    for path in (folder / "transformer").iterdir():
        path.unlink()
    save_transformer(folder / "transformer", kind, config)
    return folder


@pytest.mark.parametrize(
    ("name", "cut", "blocks", "parameters"),
    [("sana-0.6b", "7,7", 14, 289e6), ("sana-1.6b", "5,5", 10, 779e6), ("flux", "0,0", 2, 339.8e6)],
)
def test_a_model_of_published_size_exports_and_takes_real_steps(photos_dir, tmp_path, name, cut, blocks, parameters):
    model, bundle, run_dir = save_model(tmp_path / "model", name), tmp_path / "bundle", tmp_path / "run"
    settings = ["--set", "export.image_side=128", "--set", "export.patch_side=128", "--set", "export.batch_size=1"]
    command = [sys.executable, "-m", "host.cli", "export", str(photos_dir), "-o", str(bundle), "--model", str(model)]
    command += ["--prompt", PROMPT, "--cut", cut, "--set", "export.samples=3", "--json", *settings]
    environment = os.environ | {"POCKETDIT_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    # One block in float32, one as the base's shards have it, and what a sample takes; never the model (3.2 GB for SANA-1.6B).
    held = json.loads(done.stdout.splitlines()[-1])["peak_private_bytes"]
    print(f"{name}: the export held {held / 2**20:.0f} MiB")
    assert held < (2.5e9 if name == "flux" else 1.5e9)
    manifest = read_manifest(bundle)
    assert len(manifest.blocks) == blocks
    assert (bundle / manifest.programs.file).stat().st_size < 1_000_000
    shipped = sum((bundle / block.file).stat().st_size for block in manifest.blocks) / 4
    assert shipped == pytest.approx(parameters, rel=0.01)
    train = [sys.executable, "-m", "host.cli", "train", str(bundle), "--run", str(run_dir), "--steps", "2"]
    done = subprocess.run([*train, "--set", "train.accumulation=1"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(torch.isfinite(torch.tensor([row["loss"], row["grad_norm"]])).all() for row in rows)
    shutil.rmtree(tmp_path)  # gigabytes; pytest would keep them
    # Streaming: what training holds has nothing to do with the size of the weights.
    assert rows[-1]["peak_private_bytes"] < 4 * parameters / 2
