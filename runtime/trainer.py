"""The training loop, the only one of the product: stream the middle blocks forward, then backward, then update the LoRA.

Reads a bundle, writes a run folder: `run.json`, `metrics.jsonl`, `checkpoints/`, `adapter.safetensors`.
Keep in sync with android_demo's Trainer.kt.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from runtime import __version__, atomic
from runtime.adapter import LoraParameters, save_adapter
from runtime.bundle import Bundle, sha256_file
from runtime.checkpoint import load_latest, save_checkpoint
from runtime.errors import BudgetExceededError, NonFiniteLossError, StorageFullError
from runtime.manifest import FILE_NAME as MANIFEST
from runtime.manifest import TrainingSpec
from runtime.memory import MIB, MemoryWatch, storage_read_bytes
from runtime.metrics import MetricsWriter, read_metrics
from runtime.optimizer import AdamW, clip_gradient, scheduled_rate
from runtime.programs import BlockPrograms, default_threads
from runtime.sample_store import Sample, SampleStore, sample_order
from runtime.schema import encode
from runtime.tensor_file import TensorFile
from runtime.weight_stream import WeightStream

SCHEMA = "pocketdit.run/1"
ADAPTER = "adapter.safetensors"

StepCallback = Callable[[dict[str, Any]], None]
PhaseCallback = Callable[[str, int, int | None], None]
"""Phase (load, read, forward, loss, backward, optimizer, checkpoint, adapter), step, the block's index in the base model."""


class Trainer:
    """Holds what one sample needs: programs, weight stream, sample store and the LoRA.

    Attributes:
        lora: The trained parameters and their gradient.
        threads: Size of the thread pool.
        split_s: Seconds spent so far by phase: read, forward, backward, optimizer.
        step: The step under way, for `on_phase`.
    """

    def __init__(
        self, bundle: Bundle, *, threads: int | None = None, on_phase: PhaseCallback = lambda phase, step, block: None
    ) -> None:
        """Opens everything a bundle names; reads no weights yet."""
        self._on_phase = on_phase
        self.step = 0
        self.blocks = bundle.manifest.blocks
        self.threads = threads or default_threads(bundle)
        self.programs = BlockPrograms(bundle, threads=self.threads)
        self.weights = WeightStream(bundle)
        self.samples = SampleStore([bundle.path(shard) for shard in bundle.manifest.samples.shards])
        self.lora = LoraParameters(bundle)
        loss_file = TensorFile(bundle.path(bundle.manifest.loss_file))
        self._loss_weights = {name: loss_file.tensor(name) for name in loss_file.names()}
        self.sample_bytes = 0
        self.split_s = dict.fromkeys(("read", "forward", "backward", "optimizer"), 0.0)

    def reserve(self) -> None:
        """Runs the backward method with the largest workspace once, for nothing: XNNPACK's then has its final size.

        It grows by being made anew while the old one is still there; in the first backward pass that would be the peak of
        the whole run.
        """
        sample = self.samples.read(0)
        backward = [self.programs.methods[f"{block.kind}_backward"] for block in self.blocks]
        position = max(range(len(self.blocks)), key=lambda at: backward[at].workspace_bytes)
        self._on_phase("load", 0, self.blocks[position].index)
        weights = self.weights.acquire(position)
        state = sample.tensors["hidden"]
        inputs = self._inputs(sample, position) | weights | {"hidden": state, "grad_output": torch.zeros_like(state)}
        self.programs.call(f"{self.blocks[position].kind}_backward", inputs)
        del weights, inputs
        self.weights.release(position, again=False)

    def forward(self, samples: Sequence[Sample]) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
        """Runs the middle blocks forward, each block on all samples before the next.

        Returns:
            For each block the input (S, D) of each sample, kept for the backward pass; the last block's outputs (S, D).
        """
        hidden = [sample.tensors["hidden"] for sample in samples]
        block_inputs = []
        for position, block in enumerate(self.blocks):
            self.weights.prefetch(position + 1)
            with self._phase("read", block.index):
                weights = self.weights.acquire(position)
            block_inputs.append(hidden)
            with self._phase("forward", block.index):
                inputs = [self._inputs(sample, position) | weights for sample in samples]
                hidden = [
                    self.programs.call(f"{block.kind}_forward", own | {"hidden": state})["hidden"].clone()
                    for own, state in zip(inputs, hidden, strict=True)
                ]
            del weights, inputs
            self.weights.release(position, again=position + 1 == len(self.blocks))
        return block_inputs, hidden

    def loss(self, sample: Sample, hidden: torch.Tensor) -> tuple[float, torch.Tensor]:
        """The training loss and its gradient (S, D) with respect to the last middle block's output `hidden` (S, D)."""
        with self._phase("forward", shown="loss"):
            outputs = self.programs.call("loss", sample.tensors | self._loss_weights | {"hidden": hidden})
            return float(outputs["loss"]), outputs["grad_hidden"].clone()

    def accumulate(self, samples: Sequence[Sample], scale: float) -> list[float]:
        """Adds `scale` times each sample's gradient to the LoRA's and returns the samples' losses.

        One pass over the weights serves all samples; the sum is the same, bit for bit, as of one sample after the other.

        Raises:
            NonFiniteLossError: A loss is NaN or infinite.
        """
        self.weights.prefetch(0)
        block_inputs, hidden = self.forward(samples)
        losses, gradients = [], []
        for sample, state in zip(samples, hidden, strict=True):
            loss, gradient = self.loss(sample, state)
            if not math.isfinite(loss):
                raise NonFiniteLossError(
                    f"The loss of sample {sample.identity.index} ({sample.identity.photo}, sigma {sample.identity.sigma:.3f}) "
                    f"is {loss}. Nothing of this step is saved; resume with a lower learning rate in a new run folder."
                )
            losses.append(loss)
            gradients.append(gradient)
        del hidden
        for position in range(len(self.blocks) - 1, -1, -1):
            self.weights.prefetch(position - 1)
            with self._phase("read", self.blocks[position].index):
                weights = self.weights.acquire(position)
            with self._phase("backward", self.blocks[position].index):
                for number, (sample, state) in enumerate(zip(samples, block_inputs.pop(), strict=True)):
                    inputs = self._inputs(sample, position) | weights
                    inputs |= {"hidden": state, "grad_output": gradients[number]}
                    outputs = self.programs.call(f"{self.blocks[position].kind}_backward", inputs)
                    gradients[number] = outputs.pop("grad_hidden").clone()
                    for name, value in outputs.items():
                        self.lora.add_gradient(position, name.removeprefix("grad."), value, scale)
            del weights, inputs
            self.weights.release(position, again=position == 0)
        return losses

    def _inputs(self, sample: Sample, position: int) -> dict[str, torch.Tensor]:
        """What a block's programs take of the sample and the LoRA."""
        own = {name: sample.tensors[stored] for name, stored in self.blocks[position].inputs.items()}
        return sample.tensors | own | self.lora.block_inputs(position)

    def read(self, index: int) -> Sample:
        """Reads a sample from the store, counting its bytes."""
        with self._phase("read"):
            sample = self.samples.read(index)
        self.sample_bytes += sample.stored_bytes
        return sample

    @contextmanager
    def _phase(self, name: str, block: int | None = None, shown: str = "") -> Iterator[None]:
        self._on_phase(shown or name, self.step, block)
        start = time.perf_counter()
        yield
        self.split_s[name] += time.perf_counter() - start

    def update(self, optimizer: AdamW, settings: TrainingSpec) -> tuple[float, float]:
        """Clips, updates the LoRA, clears the gradient; returns the learning rate and the gradient's norm before clipping.

        Raises:
            NonFiniteLossError: The gradient is NaN or infinite; the parameters are untouched.
        """
        with self._phase("optimizer"):
            norm = clip_gradient(self.lora.gradient, settings.max_grad_norm)
            if not math.isfinite(norm):
                raise NonFiniteLossError(
                    "The gradient is NaN or infinite. Nothing of this step is saved; lower the learning rate."
                )
            rate = scheduled_rate(
                optimizer.step_count,
                steps=settings.steps,
                learning_rate=settings.learning_rate,
                warmup_steps=settings.warmup_steps,
                schedule=settings.schedule,
            )
            optimizer.step(
                self.lora.flat,
                self.lora.gradient,
                learning_rate=rate,
                beta1=settings.beta1,
                beta2=settings.beta2,
                epsilon=settings.epsilon,
                weight_decay=settings.weight_decay,
            )
            self.lora.gradient.zero_()
        return rate, norm


def planned_private_bytes(bundle: Bundle, micro_batch: int = 1) -> int:
    """Private memory training will hold: arenas and workspace of the programs, the LoRA with gradient and moments, and for
    each sample of a micro-batch its record and the inputs of all blocks.

    Args:
        bundle: Its manifest has the sizes.
        micro_batch: Samples that go through a block together.
    """
    manifest = bundle.manifest
    methods = manifest.programs.methods
    lora_bytes, state_bytes, records = 0, 0, {}
    for block in manifest.blocks:
        for spec in methods[f"{block.kind}_forward"].inputs:
            size = 4 * math.prod(spec.shape)
            if spec.role == "lora":
                lora_bytes += size
            elif spec.role == "state":
                state_bytes = size
            elif spec.role == "conditioning":
                records[block.inputs.get(spec.name, spec.name)] = size
    for spec in methods["loss"].inputs:
        if spec.role in ("conditioning", "tail_residual", "target"):
            records[spec.name] = 4 * math.prod(spec.shape)
    arenas = sum(spec.planned_bytes for spec in methods.values())
    states = state_bytes * (len(manifest.blocks) + 3)
    return arenas + manifest.programs.workspace_bytes + 4 * lora_bytes + micro_batch * (states + sum(records.values()))


def budget_of(bundle: Bundle, budget_mib: int | None) -> int | None:
    """The budget that holds, MiB: the one given, else the bundle's own, else none.

    Raises:
        BudgetExceededError: The plan is above it.
    """
    if budget_mib is None and bundle.manifest.budget is not None:
        budget_mib = bundle.manifest.budget.mib
    planned = planned_private_bytes(bundle)
    if budget_mib is not None and planned > budget_mib * MIB:
        raise BudgetExceededError(
            f"Training {bundle.dir} takes at least {planned / MIB:.0f} MiB of private memory, the budget is {budget_mib} MiB. "
            "Raise --budget, or export with fewer prompt tokens or a smaller patch."
        )
    return budget_mib


def choose_micro_batch(bundle: Bundle, accumulation: int, budget_bytes: int | None) -> int:
    """The largest divisor of `accumulation` whose plan leaves a tenth of the budget free; all samples without a budget.

    More samples at a time read fewer bytes from flash; the result is the same.
    """
    sizes = [size for size in range(accumulation, 0, -1) if accumulation % size == 0]
    if budget_bytes is None:
        return accumulation
    return next((size for size in sizes if planned_private_bytes(bundle, size) <= 0.9 * budget_bytes), 1)


def train(
    bundle_dir: Path,
    run_dir: Path,
    settings: TrainingSpec | None = None,
    *,
    budget_mib: int | None = None,
    threads: int | None = None,
    micro_batch: int | None = None,
    on_start: Callable[[dict[str, Any]], None] = lambda run: None,
    on_step: StepCallback = lambda row: None,
    on_phase: PhaseCallback = lambda phase, step, block: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Trains the LoRA of a bundle, or goes on where this run folder stopped.

    Args:
        bundle_dir: What `export` made.
        run_dir: Made if it is not there; the same command on the same folder resumes.
        settings: None takes the manifest's.
        budget_mib: Most private memory beyond the idle process, MiB; None takes the bundle's, without one there is no limit.
        threads: Size of the thread pool; None is `default_threads`.
        micro_batch: Samples that go through a block together, a divisor of the accumulation; None is `choose_micro_batch`.
        on_start: Called with the content of `run.json` before the first step: what was chosen.
        on_step: Called with each row of the metrics.
        on_phase: Called when a phase begins, many times a step: what is under way, where memory ran out.
        should_stop: Asked after each step; true saves a checkpoint and returns with status `stopped`.

    Returns:
        The content of `run.json`.

    Raises:
        BundleError: The bundle is off.
        CheckpointError: The run folder belongs to another bundle or other settings.
        BudgetExceededError: The plan, or the measured peak, is above the budget; what is trained is in a checkpoint.
        NonFiniteLossError: The loss or gradient became NaN or infinite.
        StorageFullError: A checkpoint, the log or the adapter found no space; the same command goes on from the last one.
    """
    watch = MemoryWatch()
    on_phase("load", 0, None)
    bundle = Bundle(bundle_dir)
    settings = settings or bundle.manifest.training
    budget_mib = budget_of(bundle, budget_mib)
    budget_bytes = None if budget_mib is None else budget_mib * MIB
    if micro_batch is None:
        micro_batch = choose_micro_batch(bundle, settings.accumulation, budget_bytes)
    if settings.accumulation % micro_batch:
        raise ValueError(
            f"micro_batch: got {micro_batch}, expected a divisor of the accumulation {settings.accumulation}."
        )
    binding = _binding(bundle, settings)
    trainer = Trainer(bundle, threads=threads, on_phase=on_phase)
    optimizer = AdamW(trainer.lora.flat.numel())
    first_step = load_latest(run_dir, trainer.lora, optimizer, binding)
    trainer.reserve()
    run: dict[str, Any] = {
        "schema": SCHEMA,
        "status": "running",
        "bundle": str(bundle_dir.resolve()),
        "version": __version__,
        "settings": encode(settings),
        "budget_mib": budget_mib,
        "threads": trainer.threads,
        "micro_batch": micro_batch,
        "weights": bundle.manifest.weights,
        "drops_behind": trainer.weights.drops_behind,
        "planned_private_bytes": planned_private_bytes(bundle, micro_batch),
        "idle_private_bytes": watch.idle_private_bytes,
        "summary": {},
        "versions": {name: metadata.version(name) for name in ("torch", "executorch")},
    }
    atomic.write_json(run_dir / "run.json", run)
    on_start(run)
    log = MetricsWriter(run_dir, resume_step=first_step)
    order = itertools.islice(
        sample_order(len(trainer.samples), settings.seed), first_step * settings.accumulation, None
    )
    before = log.last or {"seconds": 0.0, "streamed_bytes": 0, "flash_read_bytes": 0, "peak_private_bytes": 0}
    watch.peak_private_bytes = before["peak_private_bytes"]
    started, storage_start = time.perf_counter(), storage_read_bytes()
    status = "complete"
    try:
        with watch:
            for step in range(first_step + 1, settings.steps + 1):
                trainer.step = step
                step_start, split_start = time.perf_counter(), dict(trainer.split_s)
                samples = [next(order) for _ in range(settings.accumulation)]
                losses = []
                for start in range(0, len(samples), micro_batch):
                    read = [trainer.read(index) for index in samples[start : start + micro_batch]]
                    losses += trainer.accumulate(read, 1 / len(samples))
                    del read
                rate, norm = trainer.update(optimizer, settings)
                private, file_backed = watch.read()
                now = time.perf_counter()
                step_ms = 1e3 * (now - step_start)
                split_ms = {name: 1e3 * (trainer.split_s[name] - split_start[name]) for name in trainer.split_s}
                row = {
                    "step": step,
                    "seconds": before["seconds"] + now - started,
                    "loss": sum(losses) / len(losses),
                    "learning_rate": rate,
                    "grad_norm": norm,
                    "step_ms": step_ms,
                    **{f"{name}_ms": spent for name, spent in split_ms.items()},
                    "other_ms": max(0.0, step_ms - sum(split_ms.values())),
                    "private_bytes": private,
                    "peak_private_bytes": watch.peak_private_bytes,
                    "file_bytes": file_backed,
                    "streamed_bytes": before["streamed_bytes"] + trainer.weights.streamed_bytes + trainer.sample_bytes,
                    "flash_read_bytes": before["flash_read_bytes"] + storage_read_bytes() - storage_start,
                    "samples": samples,
                }
                log.write(row)
                on_step(row)
                over_budget = budget_bytes is not None and watch.peak_private_bytes > budget_bytes
                stop = over_budget or (step < settings.steps and should_stop())
                if stop or step == settings.steps or step % settings.checkpoint_every == 0:
                    on_phase("checkpoint", step, None)
                    log.sync()
                    save_checkpoint(run_dir, step, trainer.lora, optimizer, binding)
                if over_budget:
                    raise BudgetExceededError(
                        f"Step {step} held {watch.peak_private_bytes / MIB:.1f} MiB of private memory, the budget is "
                        f"{budget_mib} MiB. The state is saved in {run_dir}; go on with a larger --budget."
                    )
                if stop:
                    status = "stopped"
                    break
            if status == "complete":
                on_phase("adapter", settings.steps, None)
                save_adapter(
                    run_dir / ADAPTER, trainer.lora, bundle.manifest, steps=settings.steps, version=__version__
                )
    except BaseException:
        status = "failed"
        raise
    finally:
        log.close()
        run |= {"status": status, "summary": summarise(read_metrics(run_dir))}
        try:
            atomic.write_json(run_dir / "run.json", run)
        except StorageFullError:
            if status != "failed":  # otherwise the error under way says why
                raise
    return run


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Totals of a run from its step log."""
    if not rows:
        return {}
    last = rows[-1]
    tenth = max(1, len(rows) // 10)
    return {
        "steps": last["step"],
        "step_ms_median": statistics.median(row["step_ms"] for row in rows),
        "peak_private_bytes": last["peak_private_bytes"],
        "streamed_bytes": last["streamed_bytes"],
        "flash_read_bytes": last["flash_read_bytes"],
        "seconds": last["seconds"],
        "first_loss": statistics.fmean(row["loss"] for row in rows[:tenth]),
        "last_loss": statistics.fmean(row["loss"] for row in rows[-tenth:]),
    }


def _binding(bundle: Bundle, settings: TrainingSpec) -> dict[str, Any]:
    """What a checkpoint belongs to. With a constant rate a longer run is the same run continued, so steps may grow."""
    values: dict[str, Any] = encode(settings)
    del values["checkpoint_every"]
    if settings.schedule == "constant":
        del values["steps"]
    return values | {"bundle manifest": sha256_file(bundle.dir / MANIFEST)}
