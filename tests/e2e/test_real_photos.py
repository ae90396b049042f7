"""Real photos and a real autoencoder (FLUX.1's tiny stand-in) through a random SANA, by command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from diffusers import AutoencoderTiny
from PIL import Image

from tests.tiny_models import save_sana

SHARED = Path(__file__).parents[3] / "shared"
PHOTOS, AUTOENCODER = SHARED / "photos" / "dog", SHARED / "models" / "taef1"


def pocketdit(*arguments: object) -> dict:
    command = [sys.executable, "-m", "host.cli", *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(not (PHOTOS.is_dir() and AUTOENCODER.is_dir()), reason="real photos lie beside the repository")
def test_five_photos_of_a_dog_become_an_adapter_and_pictures(tmp_path):
    model = save_sana(tmp_path / "model", AutoencoderTiny.from_pretrained(AUTOENCODER), sample_size=32)
    bundle, run = tmp_path / "bundle", tmp_path / "run"
    settings = ["--model", model, "--prompt", "a photo of sks dog", "--cut", "1,2", "--set", "export.samples=8"]
    assert pocketdit("doctor", PHOTOS, "--prompt", "a photo of sks dog")["accepted"] == 5
    made = pocketdit("export", PHOTOS, "-o", bundle, *settings, "--set", "export.backend=portable")
    # 256 px of pictures, f8, patch 2: patches of 128 px are 8 x 8 tokens.
    assert (made["plan"]["image_side"], made["plan"]["patch_side"]) == (256, 128)
    assert made["parity"]["program_loss"] == pytest.approx(made["parity"]["base_loss"], rel=2e-2)
    trained = pocketdit("train", bundle, "--run", run, "--steps", 3, "--budget", 64)
    assert trained["status"] == "complete"
    assert trained["summary"]["steps"] == 3
    pictures = pocketdit("generate", run, "--prompt", "sks dog on the beach", "--seeds", 0, "--set", "generate.steps=2")
    assert Image.open(run / "pictures" / pictures["items"][0]["adapter"]).size == (256, 256)
    report = Path(pocketdit("report", run)["report"]).read_text(encoding="utf-8")
    assert report.count("data:image/") >= 5 + 2
