"""Fixtures: a tiny random SANA on disk, a few drawn photos, and a bundle made from them."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from host.exporter import Exporter
from tests.tiny_models import export_config, save_flux, save_sana, small_vae


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory) -> Path:
    """Stages made by tests stay out of the user's cache and are shared within the session."""
    folder = tmp_path_factory.mktemp("cache")
    patch = pytest.MonkeyPatch()
    patch.setenv("POCKETDIT_CACHE", str(folder))
    yield folder
    patch.undo()


@pytest.fixture(scope="session")
def sana_dir(tmp_path_factory) -> Path:
    return save_sana(tmp_path_factory.mktemp("models") / "tiny-sana", small_vae())


@pytest.fixture(scope="session")
def flux_dir(tmp_path_factory) -> Path:
    return save_flux(tmp_path_factory.mktemp("models") / "tiny-flux")


@pytest.fixture(scope="session")
def photos_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for number, size in enumerate([(160, 200), (200, 160), (144, 144)]):
        coarse = rng.integers(0, 255, (8, 8, 3), np.uint8)
        Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(folder / f"photo {number}.png")
    return folder


@pytest.fixture(scope="session")
def exporter(sana_dir, photos_dir, tmp_path_factory) -> Exporter:
    """An exporter that has run; its bundle is `exporter.bundle_dir`."""
    made = Exporter(export_config(sana_dir), photos_dir, tmp_path_factory.mktemp("bundles") / "bundle")
    made.run(lambda name, cached, seconds: None)
    return made


@pytest.fixture(scope="session")
def bundle_dir(exporter) -> Path:
    return exporter.bundle_dir
