"""The study's methods and subjects, and one job of it: a method teaches a subject at a rate, then draws.

A job leaves a folder with its pictures and `job.json`, which is written last; what is there is not done again.
"""

import json
import shutil
import statistics
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from host.baselines.base import Method, Task, Trained
from host.baselines.block_skipping import BlockSkipping
from host.baselines.dreambooth import DreamBooth
from host.baselines.hollowed_net import HollowedNet
from host.baselines.lisa import Lisa
from host.baselines.lora import Lora
from host.baselines.lora_fa import LoraFA
from host.baselines.ours import Ours
from host.baselines.textual_inversion import TextualInversion
from host.baselines.zoodip import Zoodip
from host.config import Config, read_tables, resolve
from host.cut import shipped_profiles
from host.demo import SETTINGS
from host.generate import draw
from host.models import EMBEDDED, ModelFolder
from host.tail_map import TailMap
from host.tiny_base import world
from runtime import atomic

WORK = Path("/tmp/pocketdit-study")
TAIL_MAP = Path(__file__).parent / "results" / "tail_map.safetensors"

SUBJECTS = {
    "bowl with spoon": "bowl",
    "dango": "sweet",
    "dumpling": "food",
    "ferris wheel": "wheel",
    "low battery": "battery",
    "pill": "medicine",
    "wind chime": "bell",
    "worm": "animal",
}
"""Held-out labels and their class. None was used to choose a setting or a cut."""
TUNING = {"trophy": "cup", "garlic": "vegetable"}
"""Held-out labels on which rates are chosen."""
TAIL_SUBJECTS = {
    "bubbles": "soap",
    "scroll": "paper",
    "sloth": "animal",
    "sparkles": "light",
    "spoon": "cutlery",
    "volcano": "mountain",
}
"""The other held-out labels: `tail.py` fits its maps to them, beside those of TUNING."""
PROMPT_BACKGROUNDS = (
    "the beach",
    "a brick wall",
    "the snow",
    "a pink background",
    "a starry night sky",
    "a checkerboard",
)
"""In none of the photos."""
DRIFT_LABELS = ("pizza", "rocket", "penguin", "strawberry", "sailboat", "cactus")
"""Trained labels, for prompts that have nothing to do with a subject."""
SEEDS = (0, 1)
SHARES = (0.3, 0.4, 0.5)
EVEN_CUT = (4, 3)
"""Half of the blocks, from both ends alike."""
BASE = "base"
"""The row of the untrained model."""
STEP = 3.0
"""Factor between the rates of the search."""

EQUAL_COMPUTE = 2.5
"""Steps of `ours-50` that take as many operations as one of LoRA on whole pictures (`study_costs.py`)."""

Row = tuple[Method, float]
"""A method and the rate its search begins at, on this base: the authors' rates are for models a thousand times as large."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Longer:
    """A method with more steps than the others get."""

    title: str
    method: Method
    times: float

    @property
    def learning_rate(self) -> float:
        """That of the method."""
        return self.method.learning_rate

    @property
    def cut(self) -> tuple[int, ...]:
        """That of the method, if it has one."""
        return getattr(self.method, "cut", ())

    def train(self, task: Task, work_dir: Path) -> Trained:
        """See `Method`."""
        steps, warmup = (round(count * self.times) for count in (task.training.steps, task.training.warmup_steps))
        longer = replace(task.config, train=replace(task.training, steps=steps, warmup_steps=warmup))
        return self.method.train(replace(task, config=longer), work_dir)


def selected_cut(share: float) -> tuple[int, int]:
    """What the profile of the embedded base says, which was measured on other subjects."""
    return shipped_profiles()[EMBEDDED].decide(share).cut


@cache
def methods() -> dict[str, Row]:
    """All rows, in the order of the table. The selected half is the last one, so `ours-50` is `last half skipped` as well."""
    half = selected_cut(0.5)
    ours = {
        f"ours-{share:.0%}".rstrip("%"): (Ours(title=f"ours, {share:.0%} skipped {cut}", cut=cut), 1e-3)
        for share, cut in ((share, selected_cut(share)) for share in SHARES)
    }
    return {
        "lora": (Lora(), 1e-3),
        "dreambooth": (DreamBooth(title="DreamBooth, all weights", prior=False), 1e-4),
        "dreambooth-prior": (DreamBooth(title="DreamBooth, prior preservation", prior=True), 1e-4),
        "textual-inversion": (TextualInversion(), 1e-2),
        "lora-fa": (LoraFA(), 1e-3),
        "lisa": (Lisa(), 1e-4),
        "hollowed-net": (HollowedNet(), 1e-3),
        "zoodip": (Zoodip(), 1e-2),
        "lora-patches": (Lora(title="LoRA, dynamic patches", policy="low-to-high"), 1e-3),
        "no-residuals": (BlockSkipping(title=f"no residuals {half}", cut=half, residuals=False), 1e-3),
        "no-residuals-even": (BlockSkipping(title=f"no residuals {EVEN_CUT}", cut=EVEN_CUT, residuals=False), 1e-3),
        "skip-first-half": (Ours(title="first half skipped (7, 0)", cut=(7, 0)), 1e-3),
        "ours-even": (Ours(title=f"both ends skipped {EVEN_CUT}", cut=EVEN_CUT), 1e-3),
        **ours,
    }


@dataclass(frozen=True, slots=True)
class Ablation:
    """A row without a search of its own."""

    method: Method
    rate_of: str = "ours-50"
    """The row whose rate it takes."""
    side: int = world.SIDE
    """Its pictures', pixels; of another side than the base's they have no drift."""


@cache
def ablations() -> dict[str, Ablation]:
    """The ablations; `tail-map` once `benchmarks.tail` found one."""
    half, patches = selected_cut(0.5), "lora-patches"
    side, many = settings(0.0, 0).export.patch_side or world.SIDE, f"{EQUAL_COMPUTE}x the steps"
    rows = {
        "patches-high-to-low": Ablation(Ours(title="patches high to low", cut=half, policy="high-to-low")),
        "patches-random": Ablation(Ours(title="patches random", cut=half, policy="random")),
        "patches-resize": Ablation(Ours(title="resized only", cut=half, policy="resize")),
        "constant": Ablation(BlockSkipping(title="constant tail residuals (PyTorch)", cut=half)),
        "tail-runs": Ablation(BlockSkipping(title="the frozen tail runs", cut=half, tail_runs=True)),
        "refresh": Ablation(BlockSkipping(title="tail residuals made anew half-way", cut=half, refreshes=1)),
    }
    if TAIL_MAP.is_file():
        found = TailMap.load(TAIL_MAP)
        rows["tail-map"] = Ablation(
            BlockSkipping(title="a low-rank map answers for the tail", cut=half, tail_map=found)
        )
    return rows | {
        "ours-50-longer": Ablation(
            Longer(title=f"ours, 50% skipped, {many}", method=methods()["ours-50"][0], times=EQUAL_COMPUTE)
        ),
        "lora-patches-longer": Ablation(
            Longer(title=f"LoRA, dynamic patches, {many}", method=methods()[patches][0], times=EQUAL_COMPUTE), patches
        ),
        "lora-resize": Ablation(Lora(title="LoRA, resized only", policy="resize"), patches),
        "lora-resize-small": Ablation(
            Lora(title=f"LoRA, resized only, drawn at its {side} px", policy="resize"), patches, side
        ),
    }


def method_of(name: str) -> Method:
    """The method of a row."""
    return ablations()[name].method if name in ablations() else methods()[name][0]


def side_of(name: str) -> int:
    """Side of a row's pictures, pixels."""
    return ablations()[name].side if name in ablations() else world.SIDE


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One training of one subject, and its pictures."""

    method: str
    label: str
    rate: float
    steps: int
    work: Path
    drift: bool = True
    """Whether pictures without the subject are drawn too."""
    seeds: tuple[int, ...] = SEEDS

    @property
    def photos_dir(self) -> Path:
        """The subject's photos."""
        return self.work / "photos" / self.label.replace(" ", "-")

    @property
    def dir(self) -> Path:
        """Where its pictures and record go."""
        row = None if self.method == BASE else method_of(self.method)
        cut = "".join(f"-{blocks}" for blocks in getattr(row, "cut", ()))
        return self.work / "jobs" / f"{self.method}{cut}-{self.label.replace(' ', '-')}-{self.rate:.0e}-{self.steps}"


def settings(rate: float, steps: int) -> Config:
    """The demo's settings with another rate and length."""
    overrides = (
        [f"train.learning_rate={rate}", f"train.steps={steps}", f"train.warmup_steps={steps // 20}"] if steps else []
    )
    return resolve(read_tables(SETTINGS, [*overrides, "generate.steps=16"]), str(SETTINGS))


def task(job: Job) -> Task:
    """What a job's method gets: five photos of the label on five backgrounds."""
    prior = tuple(world.prompt_of(label, "a white background") for label in DRIFT_LABELS)
    return Task(
        config=settings(job.rate, job.steps),
        photos_dir=job.photos_dir,
        words=job.label,
        class_words=(SUBJECTS | TUNING | TAIL_SUBJECTS)[job.label],
        prior_prompts=prior,
    )


def base_job(job: Job) -> Job:
    """The untrained base's pictures for the same prompts and seeds."""
    return replace(job, method=BASE, rate=0.0, steps=0, drift=True)


def prompts_of(label: str) -> list[str]:
    """The six prompts of a subject."""
    return [world.prompt_of(label, background) for background in PROMPT_BACKGROUNDS]


def drift_prompts() -> list[str]:
    """Prompts without any subject."""
    return [world.prompt_of(*pair) for pair in zip(DRIFT_LABELS, PROMPT_BACKGROUNDS, strict=True)]


def run_job(job: Job) -> dict[str, Any]:
    """Trains, draws each prompt with each seed, writes `job.json` last; what is there already is not done again."""
    record = job.dir / "job.json"
    if record.is_file():
        return json.loads(record.read_text())
    import torch

    torch.set_num_threads(1)
    result: dict[str, Any] = {"method": job.method, "label": job.label, "rate": job.rate, "steps": job.steps}
    if job.method == BASE:
        model = ModelFolder(EMBEDDED)
        trained = Trained(model=model, transformer=model.load("transformer"), tensors={}, losses=[])
        result |= {"title": "the base, untrained", "bytes": 0}
    else:
        method = method_of(job.method)
        start = time.perf_counter()
        trained = method.train(task(job), job.dir / "train")
        result |= {
            "title": method.title,
            "seconds": round(time.perf_counter() - start, 1),
            "first_loss": statistics.fmean(trained.losses[:10]),
            "last_loss": statistics.fmean(trained.losses[-10:]),
            "bytes": sum(value.nbytes for value in trained.tensors.values()),
        }
    _draw(job, trained)
    shutil.rmtree(job.dir / "train", ignore_errors=True)
    atomic.write_json(record, result)
    return result


def _draw(job: Job, trained: Trained) -> None:
    asked = [(f"p{i}_s{seed}", prompt, seed) for i, prompt in enumerate(prompts_of(job.label)) for seed in job.seeds]
    if trained.words is not None:
        asked = [(name, prompt.replace(job.label, trained.words), seed) for name, prompt, seed in asked]
    if job.drift:
        asked += [(f"d{i}_s{seed}", prompt, seed) for i, prompt in enumerate(drift_prompts()) for seed in job.seeds]
    config = settings(job.rate, job.steps).generate
    pictures = draw(
        trained.model,
        [prompt for _, prompt, _ in asked],
        [seed for _, _, seed in asked],
        transformer=trained.transformer,
        steps=config.steps,
        guidance=config.guidance,
        image_side=side_of(job.method),
        label=job.method,
    )
    for (name, _, _), picture in zip(asked, pictures, strict=True):
        with atomic.atomic_path(job.dir / f"{name}.png") as temp:
            picture.save(temp, format="PNG")
