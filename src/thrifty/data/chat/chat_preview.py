"""Preview of conversations that marks the tokens with a loss, for `thrifty data preview`."""

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
    """Consecutive tokens of a conversation, either all with a loss or all without a loss."""

    text: str
    tokens: list[int]
    learned: bool


@dataclass(frozen=True)
class ChatPreview:
    """Conversations as spans of tokens, and counts over the training part."""

    source: str
    conversations: int
    tokens: int
    learned: int
    """Number of tokens with a loss."""
    cut: float
    """Fraction of conversations that are cut at `data.length`."""
    examples: list[list[ChatSpan]]


def preview(
    settings: DataSettings, learning: ChatLearningSettings, examples: int, say: Callable[[str], None]
) -> ChatPreview:
    """Return a preview of conversations. Prepare the conversations first if necessary.

    Raises UsageError like `open_instructions`.
    """
    prepared = prepare_instructions(settings, learning.template, say)
    tokenizer = read_chat_tokenizer(prepared.folder / TOKENIZER)
    conversations = StoredConversations(prepared.tokens(DataSplit.TRAIN), settings.length, learning.everything)

    def shown(number: int) -> list[ChatSpan]:
        tokens, predicted = conversations.at(number)
        marked = zip(tokens.tolist(), [False, *predicted.tolist()], strict=True)  # the first token is not predicted
        spans = [([token for token, _ in span], learned) for learned, span in groupby(marked, key=lambda each: each[1])]
        return [ChatSpan(tokenizer.decode(ids), ids, learned) for ids, learned in spans]

    chosen = permute(np.arange(min(examples, len(conversations))), len(conversations), 0)
    return ChatPreview(
        source=settings.source,
        conversations=len(conversations),
        tokens=int(conversations.sizes.sum()),
        learned=int(conversations.learned.sum()),
        cut=conversations.cut,
        examples=[shown(int(number)) for number in chosen],
    )
