"""Text to token numbers and back: a byte-level BPE trained on the data, or a tokenizer.json that was given."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from thrifty.core.errors import UsageError

END_OF_TEXT = "<|endoftext|>"
KNOWN_ENDS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<|im_end|>", "<eos>", "<|eos|>", "[SEP]")
"""What known families of tokenizers call the end of a text, the surest first."""
SMALLEST = 257
"""Vocabulary of 256 bytes and the end of text."""


class TextTokenizer:
    """Encodes any text and decodes any tokens; `end_of_text` is the token between documents.

    Text that happens to spell a special token is encoded as ordinary text, so that data cannot end a document.
    Raises UsageError where the tokenizer knows no end of text.
    """

    def __init__(self, inner: Tokenizer, name: str = "the tokenizer"):
        inner.no_padding()
        inner.no_truncation()
        inner.encode_special_tokens = True
        self.inner = inner
        ends = (inner.token_to_id(end) for end in KNOWN_ENDS)
        self.end_of_text = next((end for end in ends if end is not None), -1)
        if self.end_of_text < 0:
            raise UsageError(
                f"{name} has no end-of-text token: none of {', '.join(KNOWN_ENDS)}",
                fix=f"add one of them to it as a special token, for instance {END_OF_TEXT}",
            )

    @property
    def vocabulary(self) -> int:
        """Rows an embedding needs: one more than the largest token number."""
        return max(self.inner.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.inner.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, tokens: Iterable[int]) -> str:
        return self.inner.decode(list(tokens), skip_special_tokens=False)

    def save(self, path: Path) -> None:
        self.inner.save(str(path))


def read_tokenizer(path: Path) -> TextTokenizer:
    """The tokenizer in a tokenizer.json; raises UsageError where the file is not one."""
    if not path.is_file():
        raise UsageError(f"{path}: no such tokenizer file", fix="give the path of a tokenizer.json")
    try:
        inner = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception for every fault of the file
        raise UsageError(
            f"{path} is not a tokenizer.json: {error}", fix="give a file that `tokenizers` saved"
        ) from None
    return TextTokenizer(inner, str(path))


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> TextTokenizer:
    """A byte-level BPE (Sennrich et al. 2016, Radford et al. 2019): any text can be encoded, without unknown tokens.

    `vocabulary` counts the 256 bytes and the end of text; too little text gives fewer. Raises UsageError below 257.
    """
    if vocabulary < SMALLEST:
        raise UsageError(
            f"data.vocabulary is {vocabulary}, fewer than the 256 bytes and the end of text",
            fix=f"raise data.vocabulary to {SMALLEST} or more",
        )
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return TextTokenizer(inner)
