"""Settings left open are chosen so that training fits a budget; settings given stay."""

from dataclasses import replace

import pytest

from host.budget import HEADROOM, within_budget
from host.config import resolve
from host.exporter import Exporter
from host.model_costs import ModelCosts
from runtime.bundle import Bundle
from runtime.errors import BudgetExceededError
from runtime.manifest import BudgetSpec
from runtime.memory import MIB
from runtime.trainer import budget_of, train


def exporter_for(photos_dir, tmp_path, budget, **settings):
    export = {"model": "tiny-base", "prompt": "sks cup", "budget": budget, "image_side": 256} | settings
    config = resolve({"export": export}, "test")
    return Exporter(config, photos_dir, tmp_path / "bundle")


@pytest.fixture(scope="module")
def planned(photos_dir, tmp_path_factory):
    """MiB that training takes, by cut and side, as the plan counts."""
    exporter = exporter_for(photos_dir, tmp_path_factory.mktemp("planned"), None)
    arguments = {"prompt_tokens": exporter.prompt_length, "latent_factor": exporter.factor}
    costs = {side: ModelCosts(exporter.model.config, side, **arguments) for side in (128, 64)}
    return lambda cut, side: costs[side].phone_row(cut, "fp32").private_bytes / MIB


def test_a_large_budget_changes_nothing(photos_dir, tmp_path, planned):
    config, budget = within_budget(exporter_for(photos_dir, tmp_path, 500))
    assert (config.export.cut, config.export.patch_side) == ((3, 3), 128)
    assert budget.mib == 500
    assert budget.planned_bytes == pytest.approx(planned((3, 3), 128) * MIB)
    assert len(budget.reasons) == 1


def test_smaller_patches_come_before_fewer_blocks(photos_dir, tmp_path, planned):
    least, default = planned((3, 3), 64), planned((3, 3), 128)
    mib = int(default * HEADROOM)
    assert least * HEADROOM <= mib < default * HEADROOM
    config, budget = within_budget(exporter_for(photos_dir, tmp_path, mib))
    assert (config.export.cut, config.export.patch_side) == ((3, 3), 64)
    assert budget.reasons[1].startswith("too large: cut 3,3, patches of 128 px")


def test_blocks_are_skipped_where_patches_are_not_enough(photos_dir, tmp_path, planned):
    mib = int(planned((3, 3), 64) * HEADROOM)
    config, budget = within_budget(exporter_for(photos_dir, tmp_path, mib))
    assert sum(config.export.cut) > 6
    assert budget.planned_bytes * HEADROOM <= mib * MIB


def test_what_was_set_stays_and_nothing_that_fits_is_refused_with_the_least_it_takes(photos_dir, tmp_path, planned):
    given = {"cut": (2, 2), "patch_side": 64}
    with pytest.raises(
        ValueError, match=rf"got 2 MiB.*cut 2,2, patches of 64 px.*{planned((2, 2), 64):.0f} MiB.*larger"
    ):
        within_budget(exporter_for(photos_dir, tmp_path, 2, **given))


def test_the_portable_backend_has_no_plan(photos_dir, tmp_path):
    with pytest.raises(ValueError, match="got backend 'portable'"):
        within_budget(exporter_for(photos_dir, tmp_path, 100, backend="portable"))


def test_training_keeps_to_the_budget_of_the_bundle_unless_told_another(exporter, photos_dir, tmp_path):
    budget = BudgetSpec(mib=100, planned_bytes=9 * MIB, reasons=("all fits",))
    Exporter(exporter.config, photos_dir, tmp_path / "bundle", budget).run(lambda name, cached, seconds: None)
    bundle = Bundle(tmp_path / "bundle")
    assert bundle.manifest.budget == budget
    assert (budget_of(bundle, None), budget_of(bundle, 200)) == (100, 200)
    with pytest.raises(BudgetExceededError, match="the budget is 0 MiB"):
        budget_of(bundle, 0)
    settings = replace(bundle.manifest.training, steps=1)
    assert train(tmp_path / "bundle", tmp_path / "run", settings)["budget_mib"] == 100
