"""One adapter per model family; importing this package registers them."""

from host.models import flux, sana, sd3  # noqa: F401
from host.models.base import BlockRef, ModelAdapter, PromptStates, register_model
from host.models.folder import EMBEDDED, ModelFolder

__all__ = ["EMBEDDED", "BlockRef", "ModelAdapter", "ModelFolder", "PromptStates", "register_model"]
