"""Checks a finished bundle against the eager base model: with B = 0 the runtime's loss must be the base's own."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from runtime.bundle import Bundle
from runtime.errors import ExportError
from runtime.trainer import Trainer

TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2, "int8": 5e-2}
"""Relative, by the sample store's dtype: float32 rounding over the stack; 8 bits of bf16 mantissa; 7 bits of int8."""
WEIGHT_TOLERANCES = {"fp32": 0.0, "fp16": 1e-3, "bf16": 1e-2, "int8": 2e-2, "int4": 2e-1}
"""Added for the weights' format: twice to four times the relative error of a weight (tests/export/test_quantize.py)."""


@dataclass(frozen=True, slots=True)
class Parity:
    """Loss of the first samples through the programs and through diffusers."""

    program_loss: float
    base_loss: float

    @property
    def relative_error(self) -> float:
        """Difference relative to the base's loss."""
        return abs(self.program_loss - self.base_loss) / max(self.base_loss, 1e-12)


def check_parity(bundle_dir: Path, indices: Iterable[int] = (0, 1, 2, 3)) -> Parity:
    """Runs a few samples through the bundle's programs as training would.

    Returns:
        Mean losses of both sides.

    Raises:
        ExportError: They differ by more than the stored precision explains.
    """
    bundle = Bundle(bundle_dir, verify_hashes=False)
    trainer = Trainer(bundle)
    samples = [trainer.read(index) for index in indices if index < len(trainer.samples)]
    losses = [
        trainer.loss(sample, state)[0] for sample, state in zip(samples, trainer.forward(samples)[1], strict=True)
    ]
    parity = Parity(sum(losses) / len(losses), sum(sample.base_loss for sample in samples) / len(samples))
    tolerance = TOLERANCES[bundle.manifest.samples.dtype] + WEIGHT_TOLERANCES[bundle.manifest.weights]
    if not parity.relative_error <= tolerance:
        raise ExportError(
            f"{bundle_dir}: the programs' loss is {parity.program_loss:.6f}, the base model's {parity.base_loss:.6f}; they may "
            f"differ by {tolerance:g}. The bundle is not usable; please report the model and the settings."
        )
    return parity
