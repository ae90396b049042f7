"""What the methods we are compared with share: a subject as each gets it, the samples, the loop, what comes out.

All see the same photos, prompts, noise levels, noise and order of samples as our own training; only the crops differ, where a
method takes whole pictures. The base runs through its diffusers modules, block by block, in PyTorch.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from peft import LoraConfig
from torch import Tensor, nn

from host import residuals, schedule
from host.config import Config, PatchPolicy
from host.exporter import Exporter
from host.frozen_base import Patches, token_grid
from host.models import ModelFolder
from runtime.manifest import TrainingSpec
from runtime.optimizer import scheduled_rate
from runtime.sample_store import sample_order

LossOf = Callable[[Sequence[int]], Tensor]
"""Losses (B,) of the samples with these numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One subject to be taught to one base, with the settings all methods share."""

    config: Config
    photos_dir: Path
    words: str
    """What the prompts call the subject, e.g. `sks dog`."""
    class_words: str
    """What kind of thing it is, e.g. `dog`."""
    prior_prompts: tuple[str, ...] = ()
    """Prompts of other things of its class; prior preservation holds on to what the base makes of them."""
    micro_batch: int | None = None
    """Samples in memory at once; None is all of a step. The result is the same up to rounding."""
    during: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Entered for the steps themselves: what measures them, and neither the preparation nor the drawing."""

    @property
    def training(self) -> TrainingSpec:
        """Steps, rate and so on."""
        return self.config.train

    def exporter(self, bundle_dir: Path, **changes: Any) -> Exporter:
        """An export of this subject, with some settings changed; its photos, sides, cut and layers with LoRA are checked."""
        config = replace(self.config, export=replace(self.config.export, **changes))
        return Exporter(config, self.photos_dir, bundle_dir)

    def pool(self, policy: PatchPolicy, cut: tuple[int, int] = (0, 0)) -> "Pool":
        """The samples of this subject; with the policy `full` whole pictures."""
        full: dict[str, Any] = {"patch_side": None} if policy == "full" else {}
        exporter = self.exporter(Path("unwritten"), patch_policy=policy, cut=cut, **full)
        plan = exporter.sample_plan()
        rows = range(len(plan.identities))
        latents = residuals.encode_patches(
            exporter.model,
            exporter.photos,
            plan,
            rows,
            exporter.patch_side,
            exporter.image_side,
            exporter.config.export.batch_size,
        )
        prompts = exporter.model.encode_prompts(plan.prompts, max_tokens=exporter.config.export.prompt_tokens)
        texts = tuple(plan.prompts[number] for number in plan.prompt_index)
        return Pool(exporter=exporter, patches=residuals.patches_of(plan, rows, latents, prompts), texts=texts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """All samples of a subject."""

    exporter: Exporter
    patches: Patches
    texts: tuple[str, ...]
    """The prompt of each sample."""

    @property
    def model(self) -> ModelFolder:
        """The base's folder."""
        return self.exporter.model


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What a method leaves behind."""

    model: ModelFolder
    """The base, with text encoders of its own where a token was learnt."""
    transformer: Any
    """Ready to draw."""
    tensors: dict[str, Tensor]
    """What the user keeps: everything that differs from the base."""
    losses: list[float]
    """Mean loss of each step."""
    words: str | None = None
    """What prompts must call the subject instead of the task's words; None changes nothing."""


class Method(Protocol):
    """One way of teaching a base model a subject."""

    @property
    def title(self) -> str:
        """Its row in a table."""

    @property
    def learning_rate(self) -> float:
        """The rate its authors, or its usual implementation, use: where a search begins."""

    def train(self, task: Task, work_dir: Path) -> Trained:
        """Teaches the subject.

        Args:
            task: The subject, the base and the settings; `task.training.learning_rate` is the rate.
            work_dir: For files on the way.
        """


def losses_of(prediction: Tensor, target: Tensor) -> Tensor:
    """Mean squared error of each sample, (B,)."""
    return (prediction - target).pow(2).flatten(1).mean(1)


@dataclass(frozen=True, slots=True)
class Skipped:
    """Blocks that are left out, and what becomes of the state in their place.

    Attributes:
        blocks: Numbers in running order.
        after: The state (B, S, D) behind them from the one before them.
    """

    blocks: range
    after: Callable[[Tensor], Tensor]


def velocity_losses(
    model: ModelFolder, transformer: Any, batch: Patches, guidance: float, skipped: Sequence[Skipped] = ()
) -> Tensor:
    """Flow-matching losses (B,) of a batch; `skipped` blocks do not run."""
    adapter, grid = model.adapter, token_grid(model, (batch.latents.shape[2], batch.latents.shape[3]))
    noisy = schedule.add_noise(batch.latents, batch.noise, batch.sigmas)
    hidden, conditioning = adapter.embed(transformer, noisy, schedule.timestep(batch.sigmas), batch.prompts, guidance)
    instead = {span.blocks.start: span for span in skipped if len(span.blocks)}
    index, num_blocks = 0, len(adapter.blocks(transformer))
    while index < num_blocks:
        if index in instead:
            hidden = instead[index].after(hidden)
            index = instead[index].blocks.stop
        else:
            hidden = adapter.run_block(transformer, index, hidden, conditioning, grid)
            index += 1
    image = hidden[:, -grid[0] * grid[1] :]
    target = adapter.target_tokens(transformer, schedule.velocity(batch.latents, batch.noise))
    return losses_of(adapter.run_output(transformer, image, conditioning), target)


@torch.no_grad()
def states_of(model: ModelFolder, transformer: Any, batch: Patches, guidance: float) -> list[Tensor]:
    """The input of every block and the output of the last, (B, S, D) each."""
    adapter, grid = model.adapter, token_grid(model, (batch.latents.shape[2], batch.latents.shape[3]))
    noisy = schedule.add_noise(batch.latents, batch.noise, batch.sigmas)
    hidden, conditioning = adapter.embed(transformer, noisy, schedule.timestep(batch.sigmas), batch.prompts, guidance)
    states = [hidden]
    for index in range(len(adapter.blocks(transformer))):
        states.append(adapter.run_block(transformer, index, states[-1], conditioning, grid))
    return states


def states_at(pool: Pool, transformer: Any, places: Sequence[int]) -> list[Tensor]:
    """States (N, S, D) of all samples before the blocks with these numbers, by the transformer as it is now."""
    settings, found = pool.exporter.config.export, []
    for rows in parts(range(len(pool.texts)), settings.batch_size):
        states = states_of(pool.model, transformer, pool.patches[rows], settings.guidance)
        found.append([states[place] for place in places])
    return [torch.cat(states) for states in zip(*found, strict=True)]


def span_residuals(pool: Pool, transformer: Any, spans: Sequence[range]) -> list[Tensor]:
    """Output minus input (N, S, D) of spans of blocks for all samples, by the transformer as it is now."""
    places = [place for span in spans for place in (span.start, span.stop)]
    states = states_at(pool, transformer, places)
    return [after - before for before, after in zip(states[::2], states[1::2], strict=True)]


def add_lora(pool: Pool, transformer: Any, blocks: Sequence[int]) -> dict[str, nn.Parameter]:
    """Puts PEFT's LoRA on the chosen layers of `blocks`; gives its matrices by name, everything else is frozen."""
    settings = pool.exporter.config.export
    paths = [ref.module for ref in pool.model.adapter.blocks(transformer)]
    layers = pool.exporter.layers
    config = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,  # type: ignore[arg-type]  # PEFT takes floats
        target_modules=[f"{paths[i]}.{layer}" for i in blocks for layer in layers[i]],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        transformer.add_adapter(config)
    return {n.replace(".default", ""): p for n, p in transformer.named_parameters() if "lora_" in n}


def adamw(parameters: Sequence[nn.Parameter], settings: TrainingSpec) -> torch.optim.Optimizer:
    """AdamW as our own training uses it."""
    return torch.optim.AdamW(
        parameters,
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
    )


def fit(
    task: Task,
    count: int,
    losses: LossOf,
    parameters: Callable[[], Sequence[nn.Parameter]],
    optimizers: Callable[[], Sequence[torch.optim.Optimizer]],
    *,
    before_step: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """The loop of every method with gradients: the order of samples, schedule and clipping are our own training's.

    Args:
        task: Has the settings.
        count: Samples in the pool.
        losses: Losses of samples by number.
        parameters: What is trained at the moment.
        optimizers: What updates it.
        before_step: Called with each step's number, from 0; may change what is trained.

    Returns:
        The mean loss of each step.
    """
    settings, order = task.training, sample_order(count, task.training.seed)
    means = []
    with task.during():
        for step in range(settings.steps):
            before_step(step)
            rows = list(itertools.islice(order, settings.accumulation))
            total = 0.0
            for part in parts(rows, task.micro_batch or len(rows)):
                loss = losses(part).sum() / len(rows)
                loss.backward()
                total += float(loss.detach())
            means.append(total)
            if settings.max_grad_norm:
                torch.nn.utils.clip_grad_norm_(parameters(), settings.max_grad_norm)
            for optimizer in optimizers():
                set_rate(optimizer, settings, step)
                optimizer.step()
                optimizer.zero_grad()
    return means


def set_rate(optimizer: torch.optim.Optimizer, settings: TrainingSpec, step: int) -> None:
    """The learning rate of our own training's schedule at a step, from 0."""
    rate = scheduled_rate(
        step,
        steps=settings.steps,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        schedule=settings.schedule,
    )
    for group in optimizer.param_groups:
        group["lr"] = rate


def parts(rows: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """Rows in runs of at most `size`."""
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def detached(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """Copies for the user to keep."""
    return {name: value.detach().clone() for name, value in parameters.items()}
