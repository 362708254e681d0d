"""Text to token numbers and back: a byte-level BPE trained on the data, or a tokenizer.json that was given."""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from thrifty.core.errors import UsageError

END_OF_TEXT = "<|endoftext|>"
TOKENIZER = "tokenizer.json"
KNOWN_ENDS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<|im_end|>", "<eos>", "<|eos|>", "[SEP]")
"""What known families of tokenizers call the end of a text, the surest first."""
SMALLEST = 257
"""Vocabulary of 256 bytes and the end of text."""
LARGEST = 1 << 22
"""Tokens, for which training reserves memory."""
LONGEST_PIECE = 2_000
"""Characters that are tokenised as one: `tokenizers` needs 150 bytes for each, and in training a time that grows with
the length of what has no white space."""
AT_ONCE = 1_000_000
"""Characters that are tokenised together."""
_UP_TO_A_BREAK = re.compile(r".*(?:\S(?=[ \n]\S)|[^\W_](?=[^\w\s]))", re.DOTALL)


def check_vocabulary(vocabulary: int, special: Sequence[str] = ()) -> None:
    """Raises UsageError where the bytes, the end of text and the special tokens need more tokens than that, and where
    it is larger than any that is trained."""
    least = SMALLEST + len(special)
    if vocabulary < least:
        others = f" and the {len(special)} special tokens of the objective" if special else ""
        raise UsageError(
            f"data.vocabulary is {vocabulary}, fewer than the 256 bytes and the end of text{others}",
            fix=f"raise data.vocabulary to {least} or more",
        )
    if vocabulary > LARGEST:
        raise UsageError(f"data.vocabulary is {vocabulary}", fix=f"lower data.vocabulary to {LARGEST} or less")


class TextTokenizer:
    """Encodes any text and decodes any tokens; `end_of_text` is the token between documents, `special` are all tokens
    that stand for no text.

    Text that happens to spell a special token is encoded as ordinary text, so that data cannot end a document.
    Raises UsageError where the tokenizer knows no end of text.
    """

    def __init__(self, inner: Tokenizer, name: str = "the tokenizer"):
        inner.encode_special_tokens = True
        self.inner, self.name = inner, name
        ends = (inner.token_to_id(end) for end in KNOWN_ENDS)
        self.end_of_text = next((end for end in ends if end is not None), -1)
        if self.end_of_text < 0:
            raise UsageError(
                f"{name} has no end-of-text token: none of {', '.join(KNOWN_ENDS)}",
                fix=f"add one of them to it as a special token, for instance {END_OF_TEXT}",
            )
        added = inner.get_added_tokens_decoder()
        self.special = frozenset([self.end_of_text, *(number for number, token in added.items() if token.special)])

    @property
    def vocabulary(self) -> int:
        """Rows an embedding needs: one more than the largest token number."""
        return max(self.inner.get_vocab(with_added_tokens=True).values()) + 1

    def number_of(self, *names: str) -> int:
        """The special token that has one of these names, the first that is known.

        Raises UsageError where the tokenizer has none of them.
        """
        numbers = (self.inner.token_to_id(name) for name in names)
        number = next((number for number in numbers if number is not None), None)
        if number is None:
            raise UsageError(
                f"{self.name} has no token {' or '.join(names)}, which the objective needs",
                fix=f"leave data.tokenizer out, so that one is trained with it, or add {names[0]} as a special token",
            )
        return number

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text. A long one is cut between words, as byte-level tokenizers do."""
        encoded: list[list[int]] = [[] for _ in texts]
        pieces = [(number, piece) for number, text in enumerate(texts) for piece in text_pieces(text)]
        step = AT_ONCE // LONGEST_PIECE
        for start in range(0, len(pieces), step):
            group = pieces[start : start + step]
            found = self.inner.encode_batch_fast([piece for _, piece in group], add_special_tokens=False)
            for (number, _), encoding in zip(group, found, strict=True):
                encoded[number] += encoding.ids
        return encoded

    def decode(self, tokens: Iterable[int]) -> str:
        return self.inner.decode(list(tokens), skip_special_tokens=False)

    def files(self) -> dict[str, str]:
        """The texts of the files in which it is kept, by name."""
        return {TOKENIZER: self.inner.to_str(pretty=True)}

    def save(self, folder: Path) -> None:
        for name, text in self.files().items():
            (folder / name).write_text(text, encoding="utf-8")


def text_pieces(text: str, longest: int = LONGEST_PIECE) -> Iterator[str]:
    """A text in pieces of at most so many characters, each ending with a word if it has several."""
    start = 0
    while len(text) - start > longest:
        words = _UP_TO_A_BREAK.match(text, start, start + longest)
        end = words.end() if words else start + longest
        yield text[start:end]
        start = end
    yield text[start:]


def read_tokenizer(path: Path) -> TextTokenizer:
    """The tokenizer in a tokenizer.json; raises UsageError where the file is not one."""
    return TextTokenizer(read_tokenizer_file(path), str(path))


def read_tokenizer_file(path: Path) -> Tokenizer:
    """Read a tokenizer.json without the padding and truncation that it sets. Raises UsageError if it is not one."""
    if not path.is_file():
        raise UsageError(f"there is no tokenizer {path}", fix="give the path of a tokenizer.json")
    try:
        inner = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception for every fault of the file
        raise UsageError(
            f"{path} is not a tokenizer.json: {error}", fix="give a file that `tokenizers` saved"
        ) from None
    inner.no_padding()
    inner.no_truncation()
    return inner


def train_tokenizer(texts: Iterable[str], vocabulary: int, special: Sequence[str] = ()) -> TextTokenizer:
    """A byte-level BPE (Sennrich et al. 2016, Radford et al. 2019): any text can be encoded, without unknown tokens.

    `vocabulary` counts the 256 bytes, the end of text and the other `special` tokens; too little text gives fewer.
    Raises UsageError where there is no room for all of these.
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
