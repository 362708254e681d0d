"""Conversations ready to learn answers from: tokenised once and kept in the cache, then given as rows.

The prepared folder is that of plain text (`data/text/token_cache.py`), with two differences: a stored token also says
whether it belongs to an answer and whether a conversation begins with it, and the chat template lies beside the
tokenizer.
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
from thrifty.data.chat.conversation_sources import ConversationSource, conversations, open_conversations
from thrifty.data.data_cache import build_folder, file_sha256
from thrifty.data.data_kind import DataKind, DataRequest
from thrifty.data.epoch_sampler import EpochSource
from thrifty.data.text.text_data import TextData, print_to_stderr, text_data
from thrifty.data.text.token_files import unigram_entropy
from thrifty.data.tokenizer import TOKENIZER, check_vocabulary, train_tokenizer
from thrifty.data.train_split import DataSplit, SplitPlan, plan_split

FORMAT = 3
AT_ONCE = 1_000
"""Conversations tokenised together."""
REASONS = 5
"""Printed of those for which conversations are left out."""
LeftOut = tuple[int, str]
"""The number of conversations left out for each reason, and the place of the first."""


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
    """Each conversation as one text."""
    for document in conversations(source):
        yield json.dumps(document, ensure_ascii=False)


def _question(document: str) -> str:
    """Return the key that decides the split of a conversation: the first user message without case and spaces."""
    messages = json.loads(document)[1]
    asked = next((message for message in messages if message["role"] == "user"), messages[0])
    return " ".join(asked["content"].casefold().split())


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
            f"{settings.source} has too few conversations to hold {100 * settings.held_out:g}% of them out, since all "
            "that begin with the same question stay together",
            fix="give conversations with more questions, or raise data.held_out",
        )
    tokenizer = chat_tokenizer or _trained(settings, source, split, template)
    with build_folder(folder) as aside:
        tokenizer.save(aside)
        counted, left_out = _write(split.parts(documents(source)), tokenizer, aside)
        train, held_out = (counted[part] for part in DataSplit)
        if not (train.conversations and held_out.conversations):
            raise UsageError(
                f"{settings.source} has too few conversations to train on and to hold out: {_left_out_text(left_out)}",
                fix="choose another objective.template, such as chatml",
            )
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
            "left_out": left_out,
        }
        prepared_cache.write_manifest(aside, manifest)


def _trained(settings: DataSettings, source: ConversationSource, split: SplitPlan, template: str) -> ChatTokenizer:
    sample = split.sample(documents(source), prepared_cache.TRAINING_TEXT)
    texts = (message["content"] for text in sample for message in json.loads(text)[1])
    plain = train_tokenizer(texts, settings.vocabulary, TURNS)
    return set_template(plain, template_source(template))


class _PartCounts:
    """What one part holds; `answers` counts every token of the vocabulary in its answers."""

    def __init__(self, vocabulary: int):
        self.conversations = self.tokens = self.bytes = 0
        self.answers = np.zeros(vocabulary, np.int64)


def _write(
    parts: Iterable[tuple[DataSplit, str]], tokenizer: ChatTokenizer, folder: Path
) -> tuple[dict[DataSplit, _PartCounts], dict[str, LeftOut]]:
    """Write the conversations of each part, tokenised, as PART.bin in a folder. Returns the counts, and by reason those
    that the template does not accept."""
    counted = {part: _PartCounts(tokenizer.vocabulary) for part in DataSplit}
    left_out: dict[str, LeftOut] = {}
    with ExitStack() as stack:
        files = {part: stack.enter_context((folder / f"{part}.bin").open("wb")) for part in DataSplit}
        placed = _placed(parts, tokenizer, left_out)
        while group := list(islice(placed, AT_ONCE)):
            encoded_group = tokenizer.encode_pieces(pieces for _, _, pieces in group)
            for (part, messages, _), encoded in zip(group, encoded_group, strict=True):
                words = stored_tokens(encoded)
                files[part].write(words.tobytes())
                count = counted[part]
                count.conversations += 1
                count.tokens += len(words)
                count.bytes += sum(len(message["content"].encode()) for message in messages)
                answers = np.array(encoded.tokens)[np.array(encoded.answer)]
                count.answers += np.bincount(answers, minlength=len(count.answers))
    return counted, left_out


def _placed(
    parts: Iterable[tuple[DataSplit, str]], tokenizer: ChatTokenizer, left_out: dict[str, LeftOut]
) -> Iterator[tuple[DataSplit, list[Message], list[ChatSegment]]]:
    """Each conversation that the template accepts; the others are counted in `left_out`."""
    for part, document in parts:
        where, messages, tools = json.loads(document)
        reason = "the chat template writes no answer"
        try:
            pieces = tokenizer.pieces(messages, tools=tools)
            if any(piece.answer for piece in pieces):
                yield part, messages, pieces
                continue
        except TemplateLimitError as error:  # others would use up their time as well
            raise TemplateLimitError(f"{where}: {error.what}", fix=error.fix) from None
        except UsageError as error:
            reason = error.what
        count, first = left_out.get(reason, (0, where))
        left_out[reason] = (count + 1, first)


def _left_out_text(left_out: Mapping[str, LeftOut]) -> str:
    """Tell how many conversations are left out, and why most are."""
    total = sum(count for count, _ in left_out.values())
    often = heapq.nlargest(REASONS, left_out.items(), key=lambda each: each[1][0])
    reasons = "".join(f"\n  {count} such as {first}: {reason}" for reason, (count, first) in often)
    return f"{total:,} conversations are left out:{reasons}"


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
