"""Tokenization of conversations, with the tokens of answers marked.

To find the start of an answer, the conversation is rendered twice: up to the prompt for the answer, and with the
answer. The first text must be a prefix of the second. The answer is tokenized separately from this position. The
tokens before an answer are then the same in training and in a chat. The spelling of a special token inside a message is
ordinary text.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from thrifty.core.errors import RefusedError, UsageError, did_you_mean
from thrifty.core.tokenizer_files import CHAT_TEMPLATE, TOKENIZER_CONFIG
from thrifty.data.chat.chat_template import NAMED, ChatTemplate, Message
from thrifty.data.tokenizer import TextTokenizer, read_tokenizer

PARTS = ("bos_token", "eos_token", "pad_token", "unk_token")
TURNS = ("<|im_start|>", "<|im_end|>")
"""Special tokens of ChatML. Tokenizers trained on conversations have these tokens."""
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
"""Noncharacters of Unicode. A noncharacter that no message contains marks positions in messages."""


@dataclass(frozen=True)
class ChatSegment:
    """A segment of a conversation: a text, or the id of a special token of the template."""

    content: str | int
    answer: bool
    """True for a segment of an answer, including the token that ends the answer."""


@dataclass(frozen=True)
class EncodedChat:
    """Tokens of a conversation, with a mask of the answers."""

    tokens: list[int]
    answer: list[bool]
    """True for each token of an answer."""


class ChatTokenizer(TextTokenizer):
    """A tokenizer with a chat template.

    Raises RefusedError for a tokenizer that splits a text after a special token differently than the text alone. Raises
    RefusedError for a template without a special token at the end of answers, because the trained model would not stop.
    """

    def __init__(self, inner: Tokenizer, template: ChatTemplate, name: str = "the tokenizer"):
        super().__init__(inner, name)
        numbers = {number: inner.id_to_token(number) for number in self.special}
        self.spelled = {word: number for number, word in numbers.items()}
        longest_first = sorted(self.spelled, key=len, reverse=True)
        self._special_words = re.compile("|".join(map(re.escape, longest_first)))
        end = {"eos_token": inner.id_to_token(self.end_of_text)}
        self.template = ChatTemplate(template.source, end | dict(template.words))
        self._check_pieces()
        self.end_of_turn = self._find_end_of_turn()
        """Special token that ends an answer."""

    def pieces(self, messages: Sequence[Message], prompt: bool = False, tools: Sequence[Any] = ()) -> list[ChatSegment]:
        """Return the segments of a conversation, cut at special tokens and at the start and end of answers.

        With `prompt`, the segments end where the next answer starts. `tools` are the tools that the conversation can
        call. An answer with the weight 0 is not marked. Raises UsageError if the template rejects the messages or
        the tools.
        """
        mark = self._unused_mark([*messages, *tools])
        written = self.template.write(self._mark(messages, mark), prompt, self._mark(tools, mark))
        answers = [message for message in messages if message["role"] == "assistant"]
        segments, done = [], 0
        for message, (begin, end) in zip(answers, written.answers, strict=True):
            segments += self._cut(written.text[done:begin], mark, False)
            learned = message.get("weight") != 0
            answer = list(self._cut(written.text[begin:end], mark, learned))
            segments += _ended(answer) if learned else answer
            done = end
        return [*segments, *self._cut(written.text[done:], mark, False)]

    def encode_pieces(self, conversations: Iterable[Sequence[ChatSegment]]) -> Iterator[EncodedChat]:
        """Yield the tokens of each conversation."""
        all_pieces = list(conversations)
        texts = [piece.content for pieces in all_pieces for piece in pieces if isinstance(piece.content, str)]
        encoded = iter(self.encode_batch(texts))
        for pieces in all_pieces:
            tokens: list[int] = []
            answer: list[bool] = []
            for piece in pieces:
                numbers = [piece.content] if isinstance(piece.content, int) else next(encoded)
                tokens += numbers
                answer += [piece.answer] * len(numbers)
            yield EncodedChat(tokens, answer)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the prompt tokens for an answer to the last message."""
        return next(self.encode_pieces([self.pieces(messages, prompt=True)])).tokens

    def files(self) -> dict[str, str]:
        """Return tokenizer.json, the template and the spelling of special tokens, in the files of transformers."""
        words = dict(self.template.words) | {"eos_token": self.inner.id_to_token(self.end_of_turn)}
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | words
        chat_files = {CHAT_TEMPLATE: self.template.source, TOKENIZER_CONFIG: json.dumps(settings, indent=2) + "\n"}
        return super().files() | chat_files

    def _mark(self, value: Any, mark: str) -> Any:
        """Insert a mark before each spelling of a special token in messages, or in a part of messages."""
        if isinstance(value, str):
            return self._special_words.sub(lambda word: mark + word[0], value)
        if isinstance(value, Mapping):
            return {key: self._mark(inner, mark) for key, inner in value.items()}
        return [self._mark(inner, mark) for inner in value] if isinstance(value, Sequence) else value

    def _cut(self, text: str, mark: str, answer: bool) -> Iterator[ChatSegment]:
        """Yield text in segments, cut at special tokens. Marked spellings in messages are not cut."""
        start = 0
        for match in self._special_words.finditer(text):
            if match.start() > 0 and text[match.start() - 1] == mark:
                continue
            if match.start() > start:
                yield ChatSegment(text[start : match.start()].replace(mark, ""), answer)
            yield ChatSegment(self.spelled[match[0]], answer)
            start = match.end()
        if start < len(text):
            yield ChatSegment(text[start:].replace(mark, ""), answer)

    def _unused_mark(self, messages: Sequence[Any]) -> str:
        texts = json.dumps(messages, ensure_ascii=False)
        unused = next((mark for mark in _MARKS if mark not in texts), None)
        if unused is None:
            raise UsageError("messages contain every noncharacter from U+FDD0 to U+FDEF", fix="remove one of them")
        return unused

    def _find_end_of_turn(self) -> int:
        pieces = self.pieces([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
        for piece in reversed(pieces):
            if piece.answer and isinstance(piece.content, int):
                return piece.content
        raise RefusedError(
            f"the chat template does not end answers with a special token of {self.name}",
            fix="set objective.template=alpaca, which requires only an end-of-text token",
        )

    def _check_pieces(self) -> None:
        word, number = next(iter(self.spelled.items()))
        for text in ("a b", "\na b"):
            self.inner.encode_special_tokens = False
            whole = self.inner.encode(word + text, add_special_tokens=False).ids
            self.inner.encode_special_tokens = True
            if whole != [number, *self.encode(text)]:
                raise RefusedError(
                    f"{self.name} splits text differently after {word!r}, but conversations must be tokenized in "
                    "segments",
                    fix="use a byte-level tokenizer, such as the tokenizer of SmolLM2, Llama 3 or Qwen",
                )


def _ended(answer: list[ChatSegment]) -> list[ChatSegment]:
    """Clear the answer flag of all segments after the token that ends the turn."""
    last = max((index for index, piece in enumerate(answer) if isinstance(piece.content, int)), default=len(answer))
    return [*answer[: last + 1], *(ChatSegment(piece.content, False) for piece in answer[last + 1 :])]


def read_chat_tokenizer(tokenizer_json: Path, template: str = "") -> ChatTokenizer:
    """Return the tokenizer of a file with a template.

    `template` is a name in NAMED or the path of a Jinja file. The default is the template in the tokenizer's folder. If
    the folder has none, the default is chatml for a tokenizer with the special tokens of ChatML, otherwise alpaca.
    Raises UsageError for an invalid file.
    """
    plain = read_tokenizer(tokenizer_json)
    words, own = _stored_template(tokenizer_json)
    return set_template(plain, template_source(template) or own or "", words, str(tokenizer_json))


def has_stored_template(tokenizer_json: Path) -> bool:
    """Return True if the folder of a tokenizer has a chat template, because its model was trained on conversations."""
    return _stored_template(tokenizer_json)[1] is not None


def set_template(
    plain: TextTokenizer, source: str, words: Mapping[str, str] | None = None, name: str = "the tokenizer"
) -> ChatTokenizer:
    """Return a tokenizer with the template `source`. An empty `source` means chatml for a tokenizer with the special
    tokens of ChatML, otherwise alpaca."""
    if not source:
        source = NAMED["chatml" if all(plain.inner.token_to_id(word) is not None for word in TURNS) else "alpaca"]
    return ChatTokenizer(plain.inner, ChatTemplate(source, words or {}), name)


def template_source(template: str) -> str:
    """Return the source of a named template or of a Jinja file; "" for an empty name."""
    if template in NAMED or not template:
        return NAMED.get(template, "")
    path = Path(template).expanduser()
    if path.is_file():
        return _template_text(path)
    raise UsageError(
        f"objective.template is {template!r}: neither a known template nor a file", fix=did_you_mean(template, NAMED)
    )


def _stored_template(tokenizer_json: Path) -> tuple[dict[str, str], str | None]:
    """Return the spelling of special tokens and the template that transformers stored in a tokenizer's folder."""
    config: dict[str, Any] = {}
    path = tokenizer_json.with_name(TOKENIZER_CONFIG)
    if path.is_file():
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{str(path)!r} is not readable JSON: {error}", fix="download the file again") from None
        if not isinstance(config, dict):
            raise UsageError(f"{str(path)!r} does not contain a JSON object", fix="download the file again")
    spelled = {part: config.get(part) for part in PARTS}
    spelled = {part: word.get("content") if isinstance(word, dict) else word for part, word in spelled.items()}
    words = {part: word for part, word in spelled.items() if word and isinstance(word, str)}
    template = tokenizer_json.with_name(CHAT_TEMPLATE)
    if template.is_file():
        return words, _template_text(template)
    own = config.get("chat_template")
    if isinstance(own, list):  # some tokenizers have several named templates
        named = (each for each in own if isinstance(each, dict))
        own = next((each.get("template") for each in named if each.get("name") == "default"), None)
    if not isinstance(own, str | None):
        raise UsageError(f"{path}: chat_template is {own!r:.80}, not text", fix="write chat_template as text")
    return words, own


def _template_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{str(path)!r} is not UTF-8 text: {error}", fix="save the template as UTF-8") from None
