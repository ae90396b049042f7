"""A token of its own for the subject: one vector in the embedding of every text encoder, which is all that is learnt.

Used by textual inversion and ZOODiP.
"""

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import AddedToken
from torch import Tensor, nn

from host.models import ModelFolder, PromptStates
from host.models.base import PromptRequest

TOKEN = "<subject>"


class Placeholder:
    """A base whose tokenizers know `<subject>`.

    Attributes:
        model: The base with these tokenizers and encoders.
        vectors: One (C,) per text encoder, by its component's name; they begin as the mean of the class's tokens.
    """

    def __init__(self, model: ModelFolder, class_words: str) -> None:
        """Loads every tokenizer and text encoder, adds the token, freezes all but its vectors."""
        self.vectors: dict[str, nn.Parameter] = {}
        components: dict[str, Any] = {}
        for name in model.components():
            if not name.startswith("text_encoder"):
                continue
            encoder, tokenizer = (
                model.load(name),
                model.load(tokenizer_name := name.replace("text_encoder", "tokenizer")),
            )
            class_ids = tokenizer(class_words, add_special_tokens=False).input_ids
            if not tokenizer.add_tokens(AddedToken(TOKEN, normalized=False)):
                raise ValueError(f"{model.dir}: {tokenizer_name} knows {TOKEN} already; it cannot stand for a subject.")
            weight = encoder.get_input_embeddings().weight
            # T5's stack has a module of its own around the shared weight.
            tables = [m for m in encoder.modules() if isinstance(m, nn.Embedding) and m.weight is weight]
            self.vectors[name] = nn.Parameter(weight[class_ids].mean(0).clone())
            _watch(encoder, tables, tokenizer.convert_tokens_to_ids(TOKEN), class_ids[0], self.vectors[name])
            components |= {name: encoder, tokenizer_name: tokenizer}
        self.model = model.with_components(**components)

    def set(self, vector: Tensor) -> None:
        """Sets the vectors of all encoders from one (sum of C,)."""
        own = list(self.vectors.values())
        for parameter, part in zip(own, vector.detach().split([len(v) for v in own]), strict=True):
            parameter.data.copy_(part)

    def named_in(self, texts: Sequence[str], words: str) -> list[str]:
        """The texts with the token where they have the subject's words.

        Raises:
            ValueError: None of them has.
        """
        named = [text.replace(words, TOKEN) for text in texts]
        if named == list(texts):
            raise ValueError(
                f"{words!r} is in none of the photos' prompts, e.g. {texts[0]!r}. A token is learnt in their "
                "place: give the words by which the prompts call the subject."
            )
        return named

    def encode(self, texts: Sequence[str], max_tokens: int | None) -> PromptStates:
        """Prompt states through which gradients reach the vectors."""
        request = PromptRequest(texts=list(texts), config=self.model.normalized_config, max_tokens=max_tokens)
        return self.model.adapter.encode_prompts(self.model.load, request)


def concatenated(states: Sequence[PromptStates]) -> PromptStates:
    """Prompts of one length, one after the other."""
    pooled = [part.pooled for part in states if part.pooled is not None]
    return PromptStates(
        torch.cat([part.states for part in states]),
        torch.cat([part.mask for part in states]),
        torch.cat(pooled) if pooled else None,
    )


def _watch(encoder: nn.Module, tables: Sequence[nn.Module], token_id: int, class_id: int, vector: nn.Parameter) -> None:
    """Shows the encoder the class's first token where the subject's stands, and lays the vector over its embedding.

    The embedding then keeps its size, and CLIP, which pools at the largest token of a text, finds the end of text still.
    """
    seen: list[Tensor] = []

    def swap(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        seen[:] = [ids == token_id]
        swapped = torch.where(seen[0], class_id, ids)
        if "input_ids" in kwargs:
            return args, kwargs | {"input_ids": swapped}
        return (swapped, *args[1:]), kwargs

    def lay_over(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        # Gemma scales its embeddings inside the module; the vector is of the table, so it is scaled likewise.
        scale = getattr(module, "embed_scale", torch.ones(()))
        return torch.where(seen[0][..., None], vector * scale, output)

    encoder.register_forward_pre_hook(swap, with_kwargs=True)
    for table in tables:
        table.register_forward_hook(lay_over)
