"""Tokenizers: a byte-level BPE trained on the data, or a tokenizer.json file."""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from thrifty.core.errors import UsageError
from thrifty.core.tokenizer_files import END_OF_TEXT, KNOWN_ENDS

TOKENIZER = "tokenizer.json"
SMALLEST = 257
"""Minimum vocabulary: 256 bytes and the end-of-text token."""
LARGEST = 1 << 22
"""Maximum vocabulary, because the training of a tokenizer reserves memory for each token."""
LONGEST_PIECE = 2_000
"""Maximum number of characters that are tokenized as one piece.

`tokenizers` needs 150 bytes of memory per character. For text without spaces, training time grows with the length of
the pieces.
"""
AT_ONCE = 1_000_000
"""Number of characters that are tokenized in one call."""
_UP_TO_A_BREAK = re.compile(r".*(?:\S(?=[ \n]\S)|[^\W_](?=[^\w\s]))", re.DOTALL)


def check_vocabulary(vocabulary: int, special: Sequence[str] = ()) -> None:
    """Raise UsageError if a vocabulary exceeds LARGEST, or is too small for bytes, end of text and special tokens."""
    least = SMALLEST + len(special)
    if vocabulary < least:
        others = f", {len(special)} special tokens of the objective" if special else ""
        raise UsageError(
            f"data.vocabulary is {vocabulary}; at least {least} are required: 256 bytes, end of text{others}",
            fix=f"set data.vocabulary to {least} or more",
        )
    if vocabulary > LARGEST:
        raise UsageError(
            f"data.vocabulary is {vocabulary}, more than {LARGEST}", fix=f"set data.vocabulary to {LARGEST} or less"
        )


class TextTokenizer:
    """A tokenizer that encodes any text and decodes any tokens.

    `end_of_text` is the token between documents. `special` contains the ids of all special tokens. Text that spells a
    special token is encoded as ordinary text, so data cannot end a document. Raises UsageError for a tokenizer without
    an end-of-text token.
    """

    def __init__(self, inner: Tokenizer, name: str = "the tokenizer"):
        inner.encode_special_tokens = True
        self.inner, self.name = inner, name
        ends = (inner.token_to_id(end) for end in KNOWN_ENDS)
        self.end_of_text = next((end for end in ends if end is not None), -1)
        if self.end_of_text < 0:
            raise UsageError(
                f"{name} has no end-of-text token: none of {', '.join(KNOWN_ENDS)}",
                fix=f"add {END_OF_TEXT} to the tokenizer as a special token",
            )
        added = inner.get_added_tokens_decoder()
        self.special = frozenset([self.end_of_text, *(number for number, token in added.items() if token.special)])

    @property
    def vocabulary(self) -> int:
        """Number of rows that an embedding requires: the largest token id plus one."""
        return max(self.inner.get_vocab(with_added_tokens=True).values()) + 1

    def number_of(self, *names: str) -> int:
        """Return the id of the first of `names` that the tokenizer has. Raises UsageError if the tokenizer has none of
        them."""
        numbers = (self.inner.token_to_id(name) for name in names)
        number = next((number for number in numbers if number is not None), None)
        if number is None:
            raise UsageError(
                f"{self.name} has no token {' or '.join(names)}, which the objective requires",
                fix=f"leave data.tokenizer out to train a tokenizer; or add {names[0]} as a special token",
            )
        return number

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text. Long texts are encoded in pieces that end between words."""
        encoded: list[list[int]] = [[] for _ in texts]
        pieces = [(number, piece) for number, text in enumerate(texts) for piece in text_pieces(text)]
        step = AT_ONCE // LONGEST_PIECE
        for start in range(0, len(pieces), step):
            group = pieces[start : start + step]
            encodings = self.inner.encode_batch_fast([piece for _, piece in group], add_special_tokens=False)
            for (number, _), encoding in zip(group, encodings, strict=True):
                encoded[number] += encoding.ids
        return encoded

    def decode(self, tokens: Iterable[int]) -> str:
        return self.inner.decode(list(tokens), skip_special_tokens=False)

    def files(self) -> dict[str, str]:
        """Return the texts of the tokenizer's files by name."""
        return {TOKENIZER: self.inner.to_str(pretty=True)}

    def save(self, folder: Path) -> None:
        for name, text in self.files().items():
            (folder / name).write_text(text, encoding="utf-8")


def text_pieces(text: str, longest: int = LONGEST_PIECE) -> Iterator[str]:
    """Yield a text in pieces of at most `longest` characters. Pieces end between words if possible."""
    start = 0
    while len(text) - start > longest:
        words = _UP_TO_A_BREAK.match(text, start, start + longest)
        end = words.end() if words else start + longest
        yield text[start:end]
        start = end
    yield text[start:]


def read_tokenizer(path: Path) -> TextTokenizer:
    """Return the tokenizer in a tokenizer.json. Raises UsageError for any other file."""
    return TextTokenizer(read_tokenizer_file(path), str(path))


def read_tokenizer_file(path: Path) -> Tokenizer:
    """Load a tokenizer.json, and disable padding and truncation. Raises UsageError for any other file."""
    if not path.is_file():
        raise UsageError(
            f"there is no tokenizer {str(path)!r}", fix="set data.tokenizer to the path of a tokenizer.json"
        )
    try:
        inner = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises Exception for every invalid file
        raise UsageError(
            f"{str(path)!r} is not a tokenizer.json: {error}",
            fix="set data.tokenizer to a file that `tokenizers` saved",
        ) from None
    inner.no_padding()
    inner.no_truncation()
    return inner


def train_tokenizer(texts: Iterable[str], vocabulary: int, special: Sequence[str] = ()) -> TextTokenizer:
    """Train a byte-level BPE (Sennrich et al. 2016, Radford et al. 2019). It has no unknown tokens.

    `vocabulary` is the number of tokens, including 256 bytes, the end of text and `special` tokens. A short text
    yields fewer tokens. Raises UsageError if `vocabulary` is too small.
    """
    check_vocabulary(vocabulary, special)
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT, *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator((piece for text in texts for piece in text_pieces(text)), trainer)
    return TextTokenizer(inner)
