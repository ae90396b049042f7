"""What an evaluation draws: the prompts of a subject, and prompts that do not name it, for drift.

Reads prompt files: one prompt a line, `{}` where the subject is named, empty lines are left out. Writes nothing.
Command: `pocketdit evaluate RUN --prompts FILE --drift-prompts FILE`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from host.subjects import PLACEHOLDER, Subject, fill, subject_words
from host.tiny_base import world

# Things, animals and places that have nothing to do with most subjects; those the instance prompt names are left out.
UNRELATED = (
    "a photo of a red car on a street",
    "a bowl of oranges on a table",
    "a portrait of an old man",
    "a sailing ship at sea",
    "a horse on a meadow",
    "a city at night",
    "a wooden chair in an empty room",
    "a mountain lake in the morning",
)
NUM_DRIFT = 8
MAX_CLASSES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt of a subject."""

    drawn: str
    """What base and adapter are asked for, e.g. `a sks dog in the snow`."""
    scored: str
    """What CLIP compares the picture with: the class in place of the subject's own words, e.g. `a dog in the snow`."""


def read_prompts(path: Path) -> tuple[str, ...]:
    """The prompts of a file.

    Raises:
        ValueError: It cannot be read as text, or has no prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({error}). Give a text file with one prompt a line.") from None
    prompts = tuple(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if not prompts:
        raise ValueError(f"{path} has no prompt. Write one a line, {PLACEHOLDER} where the subject is named.")
    return prompts


def subject_prompts(templates: Sequence[str], instance_prompt: str, subject: Subject | None) -> tuple[Prompt, ...]:
    """Prompts with the subject in place of `{}`.

    Args:
        templates: Prompts, with or without a placeholder.
        instance_prompt: The run's own; says what the subject is called.
        subject: Of the data set, for its class; None without one.

    Raises:
        ValueError: There is a placeholder, and the instance prompt has no words for the subject.
    """
    class_words = subject.class_words if subject else ""
    words = subject_words(instance_prompt, class_words) if any(PLACEHOLDER in each for each in templates) else ""
    prompts = (Prompt(drawn=fill(each, words), scored=fill(each, class_words or words)) for each in templates)
    return tuple(dict.fromkeys(prompts))


def drift_prompts(
    instance_prompt: str, subjects: Sequence[Subject], subject: Subject | None, *, tiny: bool
) -> tuple[str, ...]:
    """Prompts that do not name the subject.

    Args:
        instance_prompt: The run's own.
        subjects: Of the data set; empty without one.
        subject: The run's; its own class is among the prompts, as what the subject takes over first.
        tiny: Whether the base is the embedded one, which knows its own world only.

    Returns:
        For the embedded base trained labels on eight of its backgrounds, with a data set a photo of each class (16 at most),
        else unrelated things.
    """
    if tiny:
        labels, backgrounds = world.vocabulary(), world.background_names()
        chosen = ((labels[i * len(labels) // NUM_DRIFT], backgrounds[2 * i]) for i in range(NUM_DRIFT))
        return tuple(world.prompt_of(label, background) for label, background in chosen)
    if subject is not None:
        classes = sorted({each.class_words for each in subjects})
        if len(classes) > MAX_CLASSES:
            classes = [classes[i * len(classes) // MAX_CLASSES] for i in range(MAX_CLASSES - 1)]
        return tuple(f"a photo of a {words}" for words in sorted({*classes, subject.class_words}))
    named = set(_words(instance_prompt)) - {"a", "an", "of", "on", "in", "at", "the", "photo"}
    return tuple(prompt for prompt in UNRELATED if not named & set(_words(prompt)))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
