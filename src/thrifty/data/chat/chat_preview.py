"""`thrifty data preview`: conversations as a model will be given them, and exactly which tokens it learns."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from thrifty.core.recipe import DataSettings
from thrifty.data.chat.chat_data import Learning, prepare_instructions
from thrifty.data.chat.chat_tokenizer import read_chat_tokenizer
from thrifty.data.chat.conversation_packing import Conversations
from thrifty.data.prepared_cache import TOKENIZER
from thrifty.data.train_split import Part
from thrifty.kernels.keyed_permutation import permuted


@dataclass(frozen=True)
class Shown:
    """A run of tokens that are all learned, or all only read."""

    text: str
    tokens: list[int]
    learned: bool


@dataclass(frozen=True)
class Preview:
    """Conversations as runs of tokens, and counts over all that is trained on."""

    source: str
    conversations: int
    tokens: int
    learned: int
    """Of all tokens, those that are predicted."""
    cut: float
    """Share of the conversations that are longer than the length allows."""
    examples: list[list[Shown]]


def preview(settings: DataSettings, learning: Learning, examples: int, say: Callable[[str], None]) -> Preview:
    """Prepare the conversations if need be and show some. Raises UsageError as `open_instructions` does."""
    prepared = prepare_instructions(settings, learning.template, say)
    tokenizer = read_chat_tokenizer(prepared.folder / TOKENIZER)
    found = Conversations(prepared.tokens(Part.TRAIN), settings.length, learning.everything)

    def shown(number: int) -> list[Shown]:
        tokens, wanted = found.at(number)
        marked = zip(tokens.tolist(), [False, *wanted.tolist()], strict=True)  # nothing predicts the first token
        runs = [([token for token, _ in run], learned) for learned, run in groupby(marked, key=lambda each: each[1])]
        return [Shown(tokenizer.decode(ids), ids, learned) for ids, learned in runs]

    chosen = permuted(np.arange(min(examples, len(found))), len(found), 0)
    return Preview(
        source=settings.source,
        conversations=len(found),
        tokens=int(found.sizes.sum()),
        learned=int(found.learned.sum()),
        cut=found.cut,
        examples=[shown(int(number)) for number in chosen],
    )
