"""Conversations ready to learn answers from: tokenised once and kept in the cache, then given as rows.

The prepared folder is that of plain text (`data/text/token_cache.py`), with two differences: a stored token also says
whether it belongs to an answer and whether a conversation begins with it, and the chat template lies beside the
tokenizer.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np

from thrifty.core.errors import UsageError
from thrifty.core.objective import ChatLearningSettings, Objective
from thrifty.core.recipe import DataSettings, ModelSettings
from thrifty.data import prepared_cache
from thrifty.data.catalogue import entry_of_model
from thrifty.data.chat.chat_tokenizer import (
    TURNS,
    ChatTokenizer,
    EncodedChat,
    read_chat_tokenizer,
    set_template,
    template_source,
)
from thrifty.data.chat.conversation_packing import (
    ANSWER,
    BEGINS,
    HeldOutConversations,
    PackedConversations,
    StoredConversations,
    WeightedSource,
    arrange_rows,
)
from thrifty.data.chat.conversation_sources import ConversationSource, conversations, open_conversations
from thrifty.data.data_cache import build_folder, file_sha256
from thrifty.data.data_kind import DataKind, DataRequest
from thrifty.data.epoch_sampler import EpochSource
from thrifty.data.text.text_data import TextData, print_to_stderr, text_data
from thrifty.data.text.token_files import unigram_entropy
from thrifty.data.tokenizer import TOKENIZER, train_tokenizer
from thrifty.data.train_split import DataSplit, SplitPlan, plan_split

FORMAT = 1
AT_ONCE = 1_000
"""Conversations tokenised together."""


def open_instructions(
    settings: DataSettings, seed: int, learning: ChatLearningSettings, say: Callable[[str], None] = print_to_stderr
) -> TextData:
    """Open the conversations of a recipe; the first time, they are tokenised and kept in the cache.

    Raises UsageError where the source or a setting is not what it must be, or there is less than one batch.
    """
    prepared = prepare_instructions(settings, learning.template, say)
    tokenizer = read_chat_tokenizer(prepared.folder / TOKENIZER)
    learned = {
        part: StoredConversations(prepared.tokens(part), settings.length, learning.everything) for part in DataSplit
    }
    if not all(map(len, learned.values())):
        raise UsageError(
            f"no answer in {settings.source} begins within data.length = {settings.length} tokens",
            fix="raise data.length",
        )
    length, end_of_text = settings.length, tokenizer.end_of_text
    places = {part: arrange_rows(each.sizes - 1, length, seed, learning.together) for part, each in learned.items()}
    rows = {
        part: PackedConversations(each, places[part], length, end_of_text, learning.by_tokens)
        for part, each in learned.items()
    }
    train = rows[DataSplit.TRAIN]
    prepared_cache.refuse_less_than_a_batch(settings, len(train), f"fills {len(train)} rows")
    if train.conversations.cut:
        say(f"{train.conversations.cut:.1%} of the conversations are longer than data.length and are cut")
    held_out = HeldOutConversations(rows[DataSplit.HELD_OUT], learning.together)
    return text_data(prepared, WeightedSource(EpochSource(train, settings.batch, seed)), held_out, tokenizer)


def prepare_instructions(
    settings: DataSettings, template: str, say: Callable[[str], None]
) -> prepared_cache.TokenCache:
    """Open the prepared conversations of these settings, building them first where they are missing or damaged."""
    prepared_cache.check_settings(settings, TURNS)
    source = open_conversations(settings.source)
    tokenizer = read_chat_tokenizer(Path(settings.tokenizer).expanduser(), template) if settings.tokenizer else None
    if tokenizer is None:
        depends = ["trained", settings.vocabulary, template_source(template)]
    else:
        depends = [file_sha256(Path(tokenizer.name)), tokenizer.template.source, dict(tokenizer.template.words)]
    key = prepared_cache.cache_key("conversations", FORMAT, source.identity(), settings.held_out, *depends)
    return prepared_cache.open_or_build_tokens(
        key, settings.source, lambda folder: _build(settings, source, tokenizer, template, folder), say
    )


def documents(source: ConversationSource) -> Iterator[str]:
    """Each conversation as one text, by which it is divided into the parts."""
    for messages in conversations(source):
        yield json.dumps(messages, ensure_ascii=False)


def _build(
    settings: DataSettings,
    source: ConversationSource,
    chat_tokenizer: ChatTokenizer | None,
    template: str,
    folder: Path,
) -> None:
    split = plan_split(documents(source), settings.held_out, settings.source)
    if split.longest is not None:
        raise UsageError(
            f"{settings.source} has too few conversations to hold {100 * settings.held_out:g}% of them out",
            fix="give more conversations, or raise data.held_out",
        )
    tokenizer = chat_tokenizer or _trained(settings, source, split, template)
    with build_folder(folder) as aside:
        tokenizer.save(aside)
        counted = _write(split.parts(documents(source)), tokenizer, settings.source, aside)
        train, held_out = (counted[part] for part in DataSplit)
        manifest = {
            "format": FORMAT,
            "source": settings.source,
            "tokenizer": settings.tokenizer or "byte-level BPE trained on the training conversations",
            "vocabulary": tokenizer.vocabulary,
            "type": "<u4",
            "documents": {part: each.conversations for part, each in counted.items()},
            "tokens": {part: each.tokens for part, each in counted.items()},
            "answer_tokens": {part: int(each.answers.sum()) for part, each in counted.items()},
            "unigram_entropy": unigram_entropy(train.answers, held_out.answers),
            "bytes_per_token": held_out.bytes / held_out.tokens,
        }
        prepared_cache.write_manifest(aside, manifest)


def _trained(settings: DataSettings, source: ConversationSource, split: SplitPlan, template: str) -> ChatTokenizer:
    sample = split.sample(documents(source), prepared_cache.TRAINING_TEXT)
    texts = (message["content"] for text in sample for message in json.loads(text))
    plain = train_tokenizer(texts, settings.vocabulary, TURNS)
    return set_template(plain, template_source(template))


class _PartCounts:
    """What one part holds; `answers` counts every token of the vocabulary in its answers."""

    def __init__(self, vocabulary: int):
        self.conversations = self.tokens = self.bytes = 0
        self.answers = np.zeros(vocabulary, np.int64)


def _write(
    parts: Iterable[tuple[DataSplit, str]], tokenizer: ChatTokenizer, name: str, folder: Path
) -> dict[DataSplit, _PartCounts]:
    """The conversations of each part, tokenised, as PART.bin in a folder."""
    counted = {part: _PartCounts(tokenizer.vocabulary) for part in DataSplit}
    with ExitStack() as stack:
        files = {part: stack.enter_context((folder / f"{part}.bin").open("wb")) for part in DataSplit}
        numbered = enumerate(parts, start=1)
        while group := list(islice(numbered, AT_ONCE)):
            pieces = [_pieces(tokenizer, text, f"{name}, conversation {number}") for number, (_, text) in group]
            for (_, (part, text)), encoded in zip(group, tokenizer.encode_pieces(pieces), strict=True):
                words = stored_tokens(encoded)
                files[part].write(words.tobytes())
                count = counted[part]
                count.conversations += 1
                count.tokens += len(words)
                count.bytes += sum(len(message["content"].encode()) for message in json.loads(text))
                answers = np.array(encoded.tokens)[np.array(encoded.answer)]
                count.answers += np.bincount(answers, minlength=len(count.answers))
    return counted


def _pieces(tokenizer: ChatTokenizer, text: str, where: str) -> list:
    try:
        return tokenizer.pieces(json.loads(text))
    except UsageError as error:
        raise UsageError(f"{where}: {error.what}", fix=error.fix) from None


def stored_tokens(encoded: EncodedChat) -> np.ndarray:
    """A conversation as it is kept, up to the end of its last answer."""
    answer = np.array(encoded.answer)
    stop = int(np.flatnonzero(answer)[-1]) + 1
    words = np.array(encoded.tokens[:stop], np.uint32) | np.where(answer[:stop], np.uint32(ANSWER), np.uint32(0))
    words[0] |= np.uint32(BEGINS)
    return words


class Chats(DataKind):
    """Conversations, of which answers are learned."""

    name = "chats"

    def open(self, request: DataRequest) -> tuple[Objective, TextData]:
        objective, recipe = request.objective, request.recipe
        settings = use_model_tokenizer(recipe.data, recipe.model)
        data = open_instructions(settings, recipe.seed, objective.chat_learning(), request.say)
        return objective, replace(data, length=settings.length)


def use_model_tokenizer(settings: DataSettings, model: ModelSettings) -> DataSettings:
    """Name the tokenizer of the model's folder, where the settings name none."""
    if settings.tokenizer or not model.folder:
        return settings
    folder = Path(model.folder)
    named = entry_of_model(folder)
    if named is not None and not (folder / "config.json").is_file():
        raise UsageError(f"the model {named.name} is not on this machine yet", fix=f"thrifty data get {named.name}")
    return replace(settings, tokenizer=str(folder / "tokenizer.json"))
