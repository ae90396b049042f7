"""Models from the hub: the files of an id, from the hub or, offline, from its cache. What it does not give is said why.

Writes the hub's own cache.
"""

from collections.abc import Sequence
from pathlib import Path

import diffusers
from huggingface_hub import errors, hf_hub_download, snapshot_download

EMBEDDED = "tiny-base"
_REASONS: dict[type[Exception], str] = {
    errors.LocalEntryNotFoundError: "it cannot be reached and its cache has not the model",
    errors.GatedRepoError: "the model is gated",
    errors.RevisionNotFoundError: "there is no such revision",
    errors.EntryNotFoundError: "the model lacks a file of diffusers' layout",
    errors.RepositoryNotFoundError: "there is none of this id, or it is private",
}


def snapshot(model: str, revision: str | None, variant: str | None) -> Path:
    """Folder of the files a pipeline needs, with the token of the login or of $HF_TOKEN.

    Raises:
        ValueError: This is no id, or the hub does not give it.
    """
    _require_id(model)
    try:
        return Path(diffusers.DiffusionPipeline.download(model, revision=revision, variant=variant))
    except Exception as error:
        raise ValueError(_not_given(model, error)) from error


def config_paths(model: str, revision: str | None, components: Sequence[str]) -> list[Path]:
    """The configuration files of components, without their weights.

    Raises:
        ValueError: This is no id, or the hub does not give it.
    """
    _require_id(model)
    try:
        return [Path(hf_hub_download(model, f"{name}/config.json", revision=revision)) for name in components]
    except Exception as error:
        raise ValueError(_not_given(model, error)) from error


def files(model: str, patterns: Sequence[str]) -> Path:
    """Folder of the files that match one of `patterns`, of a model that is no pipeline.

    Raises:
        ValueError: This is no id, or the hub does not give it.
    """
    _require_id(model)
    try:
        return Path(snapshot_download(model, allow_patterns=list(patterns)))
    except Exception as error:
        raise ValueError(_not_given(model, error)) from error


def _require_id(model: str) -> None:
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise ValueError(f"Model {model!r} is neither a folder here nor a hub id (owner/name) nor {EMBEDDED!r}.")


def _not_given(model: str, error: BaseException) -> str:
    # diffusers wraps what the hub's library raised, with advice for its own callers.
    while error.__cause__ is not None and not isinstance(error, tuple(_REASONS)):
        error = error.__cause__
    reason = next((text for kind, text in _REASONS.items() if isinstance(error, kind)), "it cannot be reached")
    return (
        f"Model {model!r} is not a folder here and the hub did not give it: {reason} ({type(error).__name__}). Check the id "
        "and the revision, accept the licence and log in if it is gated (hf auth login), or give a local folder."
    )
