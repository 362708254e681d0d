"""`thrifty data preview`: conversations as a model will be given them, and exactly which tokens it learns."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from thrifty.core.objective import ChatLearningSettings
from thrifty.core.recipe import DataSettings
from thrifty.data.chat.chat_data import prepare_instructions
from thrifty.data.chat.chat_tokenizer import read_chat_tokenizer
from thrifty.data.chat.conversation_packing import StoredConversations
from thrifty.data.tokenizer import TOKENIZER
from thrifty.data.train_split import DataSplit
from thrifty.kernels.keyed_permutation import permute


@dataclass(frozen=True)
class ChatSpan:
    """A run of tokens that are all learned, or all only read."""

    text: str
    tokens: list[int]
    learned: bool


@dataclass(frozen=True)
class ChatPreview:
    """Conversations as runs of tokens, and counts over all that is trained on."""

    source: str
    conversations: int
    tokens: int
    learned: int
    """Of all tokens, those that are predicted."""
    cut: float
    """Share of the conversations that are longer than the length allows."""
    examples: list[list[ChatSpan]]


def preview(
    settings: DataSettings, learning: ChatLearningSettings, examples: int, say: Callable[[str], None]
) -> ChatPreview:
    """Prepare the conversations if need be and show some. Raises UsageError as `open_instructions` does."""
    prepared = prepare_instructions(settings, learning.template, say)
    tokenizer = read_chat_tokenizer(prepared.folder / TOKENIZER)
    conversations = StoredConversations(prepared.tokens(DataSplit.TRAIN), settings.length, learning.everything)

    def shown(number: int) -> list[ChatSpan]:
        tokens, wanted = conversations.at(number)
        marked = zip(tokens.tolist(), [False, *wanted.tolist()], strict=True)  # nothing predicts the first token
        runs = [([token for token, _ in run], learned) for learned, run in groupby(marked, key=lambda each: each[1])]
        return [ChatSpan(tokenizer.decode(ids), ids, learned) for ids, learned in runs]

    chosen = permute(np.arange(min(examples, len(conversations))), len(conversations), 0)
    return ChatPreview(
        source=settings.source,
        conversations=len(conversations),
        tokens=int(conversations.sizes.sum()),
        learned=int(conversations.learned.sum()),
        cut=conversations.cut,
        examples=[shown(int(number)) for number in chosen],
    )
