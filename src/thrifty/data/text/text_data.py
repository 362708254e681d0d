"""Text ready to train on: what a recipe's data settings lead to."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thrifty.core.batches import BatchSource
from thrifty.core.errors import UsageError
from thrifty.core.model_spec import TextModelSpec
from thrifty.core.recipe import DataSettings
from thrifty.data.epoch_sampler import EpochSource, HeldOutExamples
from thrifty.data.prepared_cache import TOKENIZER, TokenCache
from thrifty.data.text.text_pairs import TextPairs
from thrifty.data.text.token_cache import open_token_cache
from thrifty.data.text.token_windows import HeldOutWindows, PackedTokens
from thrifty.data.tokenizer import TextTokenizer
from thrifty.data.train_split import DataSplit


@dataclass(frozen=True)
class TextData:
    """Training examples, held-out examples, and what is known about the text (see `run_data.RunData`)."""

    train: BatchSource
    held_out: HeldOutExamples
    tokenizer: TextTokenizer
    vocabulary: int
    unigram_entropy: float
    """Nats per held-out token under the training frequencies of single tokens: what a model must beat."""
    bytes_per_token: float
    """Bytes of held-out text per token; nats per token / ln 2 / this = bits per byte."""
    train_tokens: int
    held_out_tokens: int
    identity: Mapping[str, str]
    """The sha256 of the token files and the tokenizer: what a resumed run must find again."""
    folder: Path
    """The prepared tokens, with tokenizer.json and manifest.json."""
    length: int = 0
    """Tokens of an example, as the recipe has it."""

    @property
    def ends(self) -> TextModelSpec:
        return TextModelSpec(self.vocabulary, self.length)

    @property
    def example_unit(self) -> int:
        return self.length

    @property
    def facts(self) -> dict[str, Any]:
        return {"unigram_entropy": self.unigram_entropy, "bytes_per_token": self.bytes_per_token}

    def description(self) -> dict[str, Any]:
        names = ("train_tokens", "held_out_tokens", "vocabulary", "unigram_entropy")
        return {name: getattr(self, name) for name in names}

    def write_metadata(self, folder: Path) -> None:
        self.tokenizer.save(folder / TOKENIZER)

    def check_meaning(self, before: Mapping[str, str], old: Path) -> None:
        if before.get(TOKENIZER) != self.identity[TOKENIZER]:
            raise UsageError(
                "the fork's tokenizer is not the old run's: its token numbers would mean something else",
                fix=f"--set data.tokenizer={(old / TOKENIZER).resolve()}",
            )


def print_to_stderr(text: str) -> None:
    print(text, file=sys.stderr)


def open_text(
    settings: DataSettings,
    seed: int,
    say: Callable[[str], None] = print_to_stderr,
    special: Sequence[str] = (),
    pairs: bool = False,
) -> TextData:
    """Open the data of a recipe; the first time, its text is tokenised and kept in the cache.

    A tokenizer that is trained has the `special` tokens besides its own. With `pairs` the source is a file of pairs;
    what is counted is then the targets. `say` receives a line when there is work to do that takes a while, when a
    damaged cache is rebuilt, or when pairs are cut. Never touches the network, except for a hub: source that is opened
    for the first time. Raises UsageError where the source or a setting is not what it must be, or the text is shorter
    than one batch.
    """
    prepared = open_token_cache(settings, say, special, pairs)
    train, held_out = (_pairs if pairs else _windows)(prepared, settings, seed, say)
    return text_data(prepared, train, held_out, prepared.tokenizer)


def text_data(
    prepared: TokenCache, train: BatchSource, held_out: HeldOutExamples, tokenizer: TextTokenizer
) -> TextData:
    """Prepared text with what was made of it, and what its manifest says."""
    manifest = prepared.manifest
    return TextData(
        train=train,
        held_out=held_out,
        tokenizer=tokenizer,
        vocabulary=manifest["vocabulary"],
        unigram_entropy=manifest["unigram_entropy"],
        bytes_per_token=manifest["bytes_per_token"],
        train_tokens=manifest["tokens"][DataSplit.TRAIN],
        held_out_tokens=manifest["tokens"][DataSplit.HELD_OUT],
        identity={name: file["sha256"] for name, file in manifest["files"].items()},
        folder=prepared.folder,
    )


def _windows(
    prepared: TokenCache, settings: DataSettings, seed: int, say: Callable[[str], None]
) -> tuple[BatchSource, HeldOutExamples]:
    train = PackedTokens(prepared.tokens(DataSplit.TRAIN), settings.length, settings.batch, seed)
    return train, HeldOutWindows(prepared.tokens(DataSplit.HELD_OUT), settings.length)


def _pairs(
    prepared: TokenCache, settings: DataSettings, seed: int, say: Callable[[str], None]
) -> tuple[BatchSource, HeldOutExamples]:
    end = prepared.tokenizer.end_of_text
    train, held_out = (TextPairs(prepared.tokens(part), settings.length, end) for part in DataSplit)
    if len(train) < settings.batch:
        raise UsageError(
            f"{settings.source} has {len(train)} pairs to train on, fewer than one batch of {settings.batch}",
            fix=f"lower data.batch to at most {len(train)}",
        )
    if train.cut:
        say(f"{train.cut:.1%} of the pairs are longer than data.length = {settings.length} and are cut")
    return EpochSource(train, settings.batch, seed), HeldOutExamples(held_out)
