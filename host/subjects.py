"""Data sets of subjects as they are published: DreamBooth and CustomConcept101, their prompts included.

Reads a folder with `prompts_and_classes.txt` (google/dreambooth) or `dataset.json` (customconcept101 of
adobe-research/custom-diffusion) and the subjects' folders beside it. Writes nothing.
Command: `pocketdit evaluate RUN --dataset FOLDER`.
"""

import ast
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from host.decode import is_picture
from runtime.bundle import sha256_file

DREAMBOOTH_FILE = "prompts_and_classes.txt"
CONCEPTS_FILE = "dataset.json"
CONCEPTS_FOLDER = "benchmark_dataset"
# The file does not say which prompts go with which subject; the paper gives its live ones, all cats and dogs, their own.
LIVE_CLASSES = ("cat", "dog")
PLACEHOLDER = "{}"
ARTICLES = ("a", "an", "the", "my", "one", "this")
# Words that end the name of a subject in a prompt, such as `on` in `a photo of sks on a table`.
PREPOSITIONS = ("on", "in", "at", "with", "near", "next", "under", "over", "wearing", "from", "by", "against")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One subject of a data set."""

    name: str
    """Of its folder, e.g. `dog6`."""
    class_words: str
    """What kind of thing it is, e.g. `dog`."""
    photos_dir: Path
    prompts: tuple[str, ...]
    """Each with `{}` where the subject is named, e.g. `a {} in the jungle`."""

    @cached_property
    def photos(self) -> dict[str, Path]:
        """Its photos by the SHA-256 of their files, in order of their names."""
        return {sha256_file(path): path for path in picture_paths(self.photos_dir)}


def read_dataset(folder: Path) -> list[Subject]:
    """Reads a data set; only the subjects whose photos are there.

    Args:
        folder: The folder that holds `prompts_and_classes.txt` or `dataset.json`, or the one above it.

    Raises:
        ValueError: There is neither file, one is not as published, or no subject has photos.
    """
    if not folder.is_dir():
        raise ValueError(f"data set {folder}: there is no such folder. Give the one with {_expected()}.")
    readers = {DREAMBOOTH_FILE: _read_dreambooth, CONCEPTS_FILE: _read_concepts}
    for place in (folder, folder / "dataset", folder / "customconcept101"):
        for name, read in readers.items():
            if (place / name).is_file():
                subjects = read(place / name)
                if not subjects:
                    raise ValueError(
                        f"{place / name} names subjects, but none of their folders with photos is beside it."
                    )
                return subjects
    raise ValueError(
        f"data set {folder}: got neither {DREAMBOOTH_FILE} nor {CONCEPTS_FILE}. Give the folder with {_expected()}."
    )


def match_subject(subjects: Sequence[Subject], photo_hashes: Collection[str], run: str) -> Subject:
    """The subject a run was trained on: the one with most of the run's photos, by their SHA-256.

    Args:
        subjects: Of the data set.
        photo_hashes: Of the photos the run was trained on.
        run: Name of the run, for the message.

    Raises:
        ValueError: No subject has any of them, or several have as many.
    """
    shared = {subject.name: len(set(photo_hashes) & set(subject.photos)) for subject in subjects}
    most = max(shared.values())
    if not most:
        raise ValueError(
            f"{run}: none of its {len(photo_hashes)} photos is in the data set ({len(subjects)} subjects, e.g. "
            f"{subjects[0].name}). Photos are compared byte by byte: train on the data set's own files, or leave --dataset out."
        )
    best = [subject for subject in subjects if shared[subject.name] == most]
    if len(best) > 1:
        raise ValueError(
            f"{run}: its photos are those of several subjects of the data set ({', '.join(s.name for s in best)}). Remove "
            "the copies."
        )
    return best[0]


def subject_words(instance_prompt: str, class_words: str = "") -> str:
    """What an instance prompt calls the subject, without an article: `sks dog` of `a photo of a sks dog on the grass`.

    Args:
        instance_prompt: The prompt that was trained with.
        class_words: If the prompt has them, the name ends with them; else it ends before the next preposition.

    Raises:
        ValueError: Nothing is left.
    """
    text = instance_prompt.strip().strip(".")
    found = re.search(rf"\b{re.escape(class_words)}s?(?!\w)", text, re.IGNORECASE) if class_words else None
    before = text[: found.start()] if found else re.split(rf"\s(?:{'|'.join(PREPOSITIONS)})\s|,", text)[0]
    name = re.split(r"\bof\b\s*", before)[-1].lstrip() + (found[0] if found else "")
    first, _, rest = name.partition(" ")
    name = (rest if first.lower() in ARTICLES else name).strip()
    if not name:
        raise ValueError(
            f"instance prompt {instance_prompt!r}: no words for the subject are left. Train with one such as "
            "'a photo of sks dog'."
        )
    return name


def fill(prompt: str, words: str) -> str:
    """A prompt with its placeholder replaced by words."""
    return prompt.replace(PLACEHOLDER, words)


def picture_paths(folder: Path) -> list[Path]:
    """The pictures of a folder, by name; hidden files are left out."""
    return sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith(".") and is_picture(p))


def _expected() -> str:
    return f"DreamBooth's {DREAMBOOTH_FILE} or CustomConcept101's {CONCEPTS_FILE}"


def _read_dreambooth(path: Path) -> list[Subject]:
    text = path.read_text(encoding="utf-8-sig")
    classes = dict(re.findall(r"^(\w+),([\w ]+?)\s*$", text.partition("Prompts")[0], re.MULTILINE))
    classes.pop("subject_name", None)
    objects, _, live = text.partition("Live Subject Prompts")
    prompts = {
        False: _prompt_list(path, objects, "Object Prompts"),
        True: _prompt_list(path, live, "Live Subject Prompts"),
    }
    if not classes:
        raise ValueError(f"{path}: got no lines such as 'dog6,dog' under 'Classes'. {_again(path)}")
    return [
        Subject(
            name=name,
            class_words=words,
            photos_dir=path.parent / name,
            prompts=prompts[words in LIVE_CLASSES],
        )
        for name, words in classes.items()
        if _has_photos(path.parent / name)
    ]


def _prompt_list(path: Path, text: str, heading: str) -> tuple[str, ...]:
    """Of lines such as `'a {0} {1} in the snow'.format(unique_token, class_token),`; nothing in them is run."""
    lines = re.findall(
        r"^\s*([\"'].*[\"'])\.format\(\s*unique_token\s*,\s*class_token\s*\)\s*,?\s*$", text, re.MULTILINE
    )
    try:
        prompts = [str(ast.literal_eval(line)) for line in lines]
    except (SyntaxError, ValueError):
        prompts = []
    filled = [re.sub(r"\{0\}\s*\{1\}", PLACEHOLDER, prompt) for prompt in prompts]
    if not filled or any(prompt.count(PLACEHOLDER) != 1 or re.search(r"\{\d", prompt) for prompt in filled):
        raise ValueError(
            f"{path}: {heading!r} has no list of lines such as \"'a {{0}} {{1}} in the snow'.format(unique_token, "
            f'class_token),". {_again(path)}'
        )
    return tuple(filled)


def _read_concepts(path: Path) -> list[Subject]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}). {_again(path)}") from None
    keys = ("class_prompt", "instance_data_dir", "prompt_filename")
    if not isinstance(entries, list) or not all(_has_text(entry, keys) for entry in entries):
        raise ValueError(f"{path}: expected a list of objects, each with the texts {', '.join(keys)}. {_again(path)}")
    subjects = []
    for entry in entries:
        photos_dir = _concept_dir(path.parent, entry["instance_data_dir"])
        if photos_dir is not None:
            subject = Subject(
                name=photos_dir.name,
                class_words=entry["class_prompt"],
                photos_dir=photos_dir,
                prompts=_concept_prompts(path, entry["prompt_filename"]),
            )
            subjects.append(subject)
    return subjects


def _concept_dir(folder: Path, named: str) -> Path | None:
    """The archive of photos is unpacked where its user likes: beside the file, below it or above it."""
    name = Path(named).name
    places = [folder / named, folder / CONCEPTS_FOLDER / name, folder / name]
    places += [folder.parent / CONCEPTS_FOLDER / name, folder.parent / "data" / CONCEPTS_FOLDER / name]
    return next((place for place in places if _has_photos(place)), None)


def _concept_prompts(path: Path, named: str) -> tuple[str, ...]:
    places = [path.parent / named, path.parent / "prompts" / Path(named).name, path.parent / Path(named).name]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise ValueError(f"{path} names the prompts {named}, which are not beside it. {_again(path)}")
    lines = [line.strip() for line in found.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    if not lines or any(PLACEHOLDER not in line for line in lines):
        raise ValueError(
            f"{found}: expected one prompt a line, each with {PLACEHOLDER} for the subject. {_again(path)}"
        )
    return tuple(lines)


def _has_text(entry: Any, keys: Sequence[str]) -> bool:
    return isinstance(entry, Mapping) and all(isinstance(entry.get(key), str) and entry[key] for key in keys)


def _has_photos(folder: Path) -> bool:
    return folder.is_dir() and bool(picture_paths(folder))


def _again(path: Path) -> str:
    return f"Get {path.name} again as it is published."
