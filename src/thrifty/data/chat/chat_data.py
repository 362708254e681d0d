"""Conversations of a recipe: opened, tokenized once into the cache, and packed into rows.

The prepared folder has the files of a token cache (`data/text/token_cache.py`), with two additions. Each stored token
has two flags: ANSWER for tokens of an answer, and BEGINS for the first token of a conversation. The chat template is
stored with the tokenizer.
"""

import heapq
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np

from thrifty.core.errors import UsageError
from thrifty.core.objective import ChatLearningSettings, Objective
from thrifty.core.recipe import DataSettings
from thrifty.data import prepared_cache
from thrifty.data.catalogue import use_model_tokenizer
from thrifty.data.chat.chat_template import Message, TemplateLimitError
from thrifty.data.chat.chat_tokenizer import (
    TURNS,
    ChatSegment,
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
from thrifty.data.chat.conversation_sources import (
    ConversationSource,
    conversations,
    holds_conversations,
    open_conversations,
)
from thrifty.data.data_cache import build_folder, file_sha256
from thrifty.data.data_kind import DataKind, DataRequest
from thrifty.data.epoch_sampler import EpochSource
from thrifty.data.text.text_data import TextData, print_to_stderr, text_data
from thrifty.data.text.token_files import unigram_entropy
from thrifty.data.tokenizer import TOKENIZER, check_vocabulary, train_tokenizer
from thrifty.data.train_split import DataSplit, SplitPlan, plan_split

FORMAT = 5
AT_ONCE = 1_000
"""Number of conversations that are tokenized in one call."""
REASONS = 5
"""Maximum number of printed reasons for left-out conversations."""
LeftOut = tuple[int, str]
"""Number of conversations that are left out for one reason, and the position of the first of them."""


def open_instructions(
    settings: DataSettings, seed: int, learning: ChatLearningSettings, say: Callable[[str], None] = print_to_stderr
) -> TextData:
    """Open the conversations of a recipe. The first time, tokenize them into the cache.

    Raises UsageError for an invalid source or setting, and for fewer rows than one batch.
    """
    prepared = prepare_instructions(settings, learning.template, say)
    tokenizer = read_chat_tokenizer(prepared.folder / TOKENIZER)
    learned = {
        part: StoredConversations(prepared.tokens(part), settings.length, learning.everything) for part in DataSplit
    }
    if not all(map(len, learned.values())):
        raise UsageError(
            f"no answer in {settings.source!r} begins within data.length = {settings.length} tokens",
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
    """Return the prepared conversations for `settings`. Build them first if they are missing or damaged."""
    if not settings.tokenizer:
        check_vocabulary(settings.vocabulary, TURNS)
    source = open_conversations(settings.source)
    tokenizer = read_chat_tokenizer(Path(settings.tokenizer).expanduser(), template) if settings.tokenizer else None
    if tokenizer is None:
        depends = ["trained", settings.vocabulary, template_source(template)]
    else:
        depends = [file_sha256(Path(tokenizer.name)), tokenizer.template.source, dict(tokenizer.template.words)]
    key = prepared_cache.cache_key("conversations", FORMAT, source.identity(), settings.held_out, *depends)
    prepared = prepared_cache.open_or_build_tokens(
        key, settings.source, lambda folder: _build(settings, source, tokenizer, template, folder), say
    )
    if left_out := prepared.manifest["left_out"]:
        say(_left_out_text(left_out))
    return prepared


def documents(source: ConversationSource) -> Iterator[str]:
    """Yield each conversation as one JSON text."""
    for document in conversations(source):
        yield json.dumps(document, ensure_ascii=False)


def _question(document: str) -> str:
    """Return the key of a conversation for the split: the first user message, without case and extra spaces."""
    messages = json.loads(document)[1]
    question = next((message for message in messages if message["role"] == "user"), messages[0])
    return " ".join(question["content"].casefold().split())


def _build(
    settings: DataSettings,
    source: ConversationSource,
    chat_tokenizer: ChatTokenizer | None,
    template: str,
    folder: Path,
) -> None:
    split = plan_split(documents(source), settings.held_out, settings.source, _question)
    if split.longest is not None:
        raise UsageError(
            f"{settings.source!r} has too few conversations to hold {100 * settings.held_out:g}% of them out, because "
            "conversations with the same first question must stay together",
            fix="add conversations with other questions; or raise data.held_out",
        )
    tokenizer = chat_tokenizer or _trained(settings, source, split, template)
    with build_folder(folder) as temporary:
        tokenizer.save(temporary)
        counts, left_out = _write(split.parts(documents(source)), tokenizer, temporary)
        train, held_out = (counts[part] for part in DataSplit)
        if not (train.conversations and held_out.conversations):
            raise UsageError(
                f"{settings.source!r} has too few conversations to train on and hold out: {_left_out_text(left_out)}",
                fix="add conversations; or set objective.template to one that accepts them: chatml, alpaca or a file",
            )
        manifest = {
            "format": FORMAT,
            "source": settings.source,
            "tokenizer": settings.tokenizer or "byte-level BPE trained on the training conversations",
            "vocabulary": tokenizer.vocabulary,
            "type": "<u4",
            "documents": {part: each.conversations for part, each in counts.items()},
            "tokens": {part: each.tokens for part, each in counts.items()},
            "answer_tokens": {part: int(each.answers.sum()) for part, each in counts.items()},
            "unigram_entropy": unigram_entropy(train.answers, held_out.answers),
            "bytes_per_token": held_out.bytes / held_out.tokens,
            "left_out": left_out,
        }
        prepared_cache.write_manifest(temporary, manifest)


def _trained(settings: DataSettings, source: ConversationSource, split: SplitPlan, template: str) -> ChatTokenizer:
    sample = split.sample(documents(source), prepared_cache.TRAINING_TEXT)
    texts = (message["content"] for text in sample for message in json.loads(text)[1])
    plain = train_tokenizer(texts, settings.vocabulary, TURNS)
    return set_template(plain, template_source(template))


class _PartCounts:
    """Counts of one part. `answers` (v,) counts how often each of the v tokens of the vocabulary occurs in answers."""

    def __init__(self, vocabulary: int):
        self.conversations = self.tokens = self.bytes = 0
        self.answers = np.zeros(vocabulary, np.int64)


def _write(
    parts: Iterable[tuple[DataSplit, str]], tokenizer: ChatTokenizer, folder: Path
) -> tuple[dict[DataSplit, _PartCounts], dict[str, LeftOut]]:
    """Write the tokens of the conversations of each part to PART.bin in a folder.

    Return the counts, and the left-out conversations by reason. A conversation is left out if the template rejects it.
    """
    counts = {part: _PartCounts(tokenizer.vocabulary) for part in DataSplit}
    left_out: dict[str, LeftOut] = {}
    with ExitStack() as stack:
        files = {part: stack.enter_context((folder / f"{part}.bin").open("wb")) for part in DataSplit}
        accepted = _accepted(parts, tokenizer, left_out)
        while group := list(islice(accepted, AT_ONCE)):
            encoded_group = tokenizer.encode_pieces(pieces for _, _, pieces in group)
            for (part, messages, _), encoded in zip(group, encoded_group, strict=True):
                words = stored_tokens(encoded)
                files[part].write(words.tobytes())
                count = counts[part]
                count.conversations += 1
                count.tokens += len(words)
                count.bytes += sum(len(message["content"].encode()) for message in messages)
                answers = np.array(encoded.tokens)[np.array(encoded.answer)]
                count.answers += np.bincount(answers, minlength=len(count.answers))
    return counts, left_out


def _accepted(
    parts: Iterable[tuple[DataSplit, str]], tokenizer: ChatTokenizer, left_out: dict[str, LeftOut]
) -> Iterator[tuple[DataSplit, list[Message], list[ChatSegment]]]:
    """Yield each conversation that the template accepts. Count rejected conversations in `left_out`."""
    for part, document in parts:
        where, messages, tools = json.loads(document)
        reason = "the chat template writes no answer"
        try:
            pieces = tokenizer.pieces(messages, tools=tools)
            if any(piece.answer for piece in pieces):
                yield part, messages, pieces
                continue
        except TemplateLimitError as error:  # other conversations would also reach the limit
            raise TemplateLimitError(f"{where}: {error.what}", fix=error.fix) from None
        except UsageError as error:
            reason = error.what
        count, first = left_out.get(reason, (0, where))
        left_out[reason] = (count + 1, first)


def _left_out_text(left_out: Mapping[str, LeftOut]) -> str:
    total = sum(count for count, _ in left_out.values())
    frequent = heapq.nlargest(REASONS, left_out.items(), key=lambda each: each[1][0])
    reasons = "".join(f"\n  {count} such as {first}: {reason}" for reason, (count, first) in frequent)
    return f"{total:,} conversations are left out:{reasons}"


def stored_tokens(encoded: EncodedChat) -> np.ndarray:
    """Return the stored tokens of a conversation, with flags, up to the end of its last answer."""
    answer = np.array(encoded.answer)
    stop = int(np.flatnonzero(answer)[-1]) + 1
    words = np.array(encoded.tokens[:stop], np.uint32) | np.where(answer[:stop], np.uint32(ANSWER), np.uint32(0))
    words[0] |= np.uint32(BEGINS)
    return words


class Chats(DataKind):
    """Conversations, with a loss on the answers."""

    name = "chats"
    about, recipe, loss = "conversations", "text", "chat_answers"

    def holds(self, settings: DataSettings) -> bool:
        return holds_conversations(settings.source)

    def open(self, request: DataRequest) -> tuple[Objective, TextData]:
        objective, recipe = request.objective, request.recipe
        settings = use_model_tokenizer(recipe.data, recipe.model)
        data = open_instructions(settings, recipe.seed, objective.chat_learning(), request.say)
        return objective, replace(data, length=settings.length)
