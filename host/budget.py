"""Picks what `export --budget` leaves open, so that training fits the budget, and says why."""

from dataclasses import replace

from host.config import Config
from host.exporter import Exporter
from host.model_costs import ModelCosts
from host.patches import default_side
from host.plan import cut_of_share
from runtime.manifest import BudgetSpec
from runtime.memory import MIB

HEADROOM = 1.05
"""The plan is counted; what is measured differs by up to 5 % (benchmarks/README.md)."""
SHARES = (0.6, 0.7, 0.8)
"""Shares of the blocks skipped, tried where the usual half is not enough."""


def within_budget(exporter: Exporter) -> tuple[Config, BudgetSpec]:
    """The settings with the fewest skipped blocks, then the largest patches, whose training fits `export.budget`.

    What the user set stays: cut and side of the patches are chosen only where they were left open, types of weights never.

    Args:
        exporter: Made from the settings as they are; its model and prompts are what counts.

    Raises:
        ValueError: Nothing fits; says what the smallest setting takes.
    """
    config, settings = exporter.config, exporter.config.export
    assert settings.budget is not None
    if settings.backend != "xnnpack":
        raise ValueError(
            f"budget: counts XNNPACK's memory, got backend {settings.backend!r}; leave the budget to `train`."
        )
    cuts, sides = [exporter.cut], [exporter.patch_side]
    cut_is_open = settings.cut is None and settings.skip is None
    if cut_is_open:
        num_blocks = len(exporter.blocks)
        cuts += [cut for share in SHARES if sum(cut := cut_of_share(num_blocks, share)) > sum(exporter.cut)]
    if settings.patch_side is None and settings.patch_policy != "full":
        smaller = default_side(exporter.patch_side, exporter.multiple)
        sides += [smaller] if smaller < exporter.patch_side else []
    costs = {
        side: ModelCosts(
            exporter.model.config,
            side,
            prompt_tokens=exporter.prompt_length,
            latent_factor=exporter.factor,
            lora_rank=settings.lora_rank,
            lora_targets=settings.lora_targets,
        )
        for side in sides
    }
    refused: list[tuple[int, str]] = []
    for cut in cuts:
        for side in sides:
            planned = costs[side].phone_row(cut, settings.weights).private_bytes
            text = f"cut {cut[0]},{cut[1]}, patches of {side} px, {settings.weights} weights: {planned / MIB:.0f} MiB"
            if planned * HEADROOM <= settings.budget * MIB:
                chosen = replace(settings, cut=cut if cut_is_open else settings.cut, patch_side=side)
                reasons = (f"{text} of {settings.budget} MiB", *(f"too large: {other}" for _, other in refused))
                return replace(config, export=chosen), BudgetSpec(
                    mib=settings.budget, planned_bytes=planned, reasons=reasons
                )
            refused.append((planned, text))
    raise ValueError(
        f"budget: got {settings.budget} MiB, but of the settings left open the smallest takes {min(refused)[1]}; a twentieth "
        "stays free. Give a larger budget, fewer prompt tokens (export.prompt_tokens), a smaller patch_side or other weights."
    )
