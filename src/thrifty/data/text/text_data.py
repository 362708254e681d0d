"""Text data of a recipe: opened, tokenized and ready for training."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from thrifty.core.batches import BatchSource
from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.model_spec import TextModelSpec
from thrifty.core.objective import Objective
from thrifty.core.randomness import seed_of
from thrifty.core.recipe import DataSettings
from thrifty.data.data_kind import DataKind, DataRequest
from thrifty.data.epoch_sampler import EpochSource, HeldOutExamples
from thrifty.data.prepared_cache import TokenCache, refuse_less_than_a_batch
from thrifty.data.run_data import ExamplePreview
from thrifty.data.run_metadata import refuse_other_tokenizer
from thrifty.data.text.document_sources import DocumentSource, holds_text
from thrifty.data.text.row_tables import first_row
from thrifty.data.text.text_mixture import MixedSource, example_counts, mixed_held_out
from thrifty.data.text.text_pairs import TextPairs, holds_pairs
from thrifty.data.text.token_cache import cautions_of, open_sources, open_token_cache
from thrifty.data.text.token_windows import HeldOutWindows, PackedTokens
from thrifty.data.tokenizer import TextTokenizer, read_tokenizer
from thrifty.data.train_split import DataSplit


class ReadableExamples(Protocol):
    """Examples that can be decoded to text."""

    def texts(self, indices: np.ndarray, decode: Callable[[list[int]], str]) -> list[str]: ...


@dataclass(frozen=True)
class TextData:
    """Training and held-out text, with statistics (see `run_data.RunData`)."""

    train: BatchSource
    held_out: HeldOutExamples
    tokenizer: TextTokenizer
    vocabulary: int
    unigram_entropy: float
    """Loss of a model that predicts the unigram frequencies of the training tokens, in nats per held-out token. A
    useful model has a lower loss."""
    bytes_per_token: float
    """Bytes of held-out text per token. Bits per byte = nats per token / (ln 2 · bytes_per_token)."""
    train_tokens: int
    held_out_tokens: int
    identity: Mapping[str, str]
    """The sha256 of the token files and the tokenizer. Hashes must not change when a run resumes."""
    folder: Path
    """Folder of the prepared tokens, tokenizer.json and manifest.json."""
    length: int = 0
    """Length of an example in tokens, from the recipe."""
    readable: ReadableExamples | None = None
    """Training examples for previews; None if they cannot be decoded."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Fraction of examples from each source of a mixture."""
    cautions: Sequence[str] = ()
    """Cautions that restrict the meaning of the held-out loss."""

    @property
    def ends(self) -> TextModelSpec:
        return TextModelSpec(self.vocabulary, self.length)

    @property
    def example_unit(self) -> int:
        return self.length

    @property
    def facts(self) -> dict[str, Any]:
        facts = {"unigram_entropy": self.unigram_entropy, "bytes_per_token": self.bytes_per_token}
        return facts | ({"cautions": self.cautions} if self.cautions else {})

    def description(self) -> dict[str, Any]:
        names = ("train_tokens", "held_out_tokens", "vocabulary", "unigram_entropy")
        shares = {"sources": dict(self.shares)} if self.shares else {}
        return {name: getattr(self, name) for name in names} | shares

    def previews(self, numbers: Sequence[int]) -> list[ExamplePreview]:
        if self.readable is None:
            raise RefusedError(
                "mixtures and conversations have no previews",
                fix="set data.source to an image folder or a single text source",
            )
        texts = self.readable.texts(np.array(numbers, np.int64), self.tokenizer.decode)
        return [ExamplePreview(number, text=text) for number, text in zip(numbers, texts, strict=True)]

    def pictures(self, inputs: Tensor) -> list[str]:
        raise RefusedError("text data have no images", fix="set data.source to an image folder")

    def metadata(self) -> dict[str, str]:
        return self.tokenizer.files()

    def check_meaning(self, before: Mapping[str, str], old: Path) -> None:
        refuse_other_tokenizer(before, self.identity, old)


def print_to_stderr(text: str) -> None:
    print(text, file=sys.stderr)


def open_text(
    settings: DataSettings,
    seed: int,
    say: Callable[[str], None] = print_to_stderr,
    special: Sequence[str] = (),
    pairs: bool = False,
    source: DocumentSource | None = None,
) -> TextData:
    """Open the text of a recipe. The first time, tokenize the text into the cache.

    A trained tokenizer also has the `special` tokens. With `pairs`, the source is a file of pairs, and only target
    tokens are counted. `source` is the opened source if it is part of a mixture. `say` receives a message before long
    work, when a damaged cache is rebuilt, or when pairs are cut. The network is used only when a hub: source is opened
    for the first time. Raises UsageError for an invalid source or setting, and for text shorter than one batch.
    """
    prepared = open_token_cache(settings, say, special, pairs, source)
    train, readable, held_out = (_pairs if pairs else _windows)(prepared, settings, seed, say)
    return text_data(prepared, train, held_out, prepared.tokenizer, readable)


def open_mixture(
    settings: DataSettings, seed: int, say: Callable[[str], None], special: Sequence[str] = ()
) -> TextData:
    """Open several sources of plain text. If no tokenizer is set, all use the tokenizer of the first source.

    Raises UsageError like `open_text`, and for invalid weights.
    """
    if settings.held_out_source:
        raise UsageError(
            "a mixture of sources holds out documents of each source, so data.held_out_source is not read",
            fix="leave data.held_out_source out; or train on one source",
        )
    counts = example_counts(settings.sources)
    parts: list[TextData] = []
    names = list(settings.sources)
    for name, source in zip(names, open_sources(settings), strict=True):
        own = replace(settings, source=name, sources={})
        if parts and not settings.tokenizer:
            own = replace(own, tokenizer=str(parts[0].folder / "tokenizer.json"))
        parts.append(open_text(own, seed_of(f"{seed}/{name}") % 2**31, say, special, source=source))
    train = MixedSource([part.train for part in parts], counts, settings.batch, seed)  # type: ignore[misc]
    shares = dict(zip(settings.sources, [count / sum(counts) for count in counts], strict=True))
    fractions = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    train.notices = (f"examples come from {fractions}",)

    def mean(name: str) -> float:
        return sum(share * getattr(part, name) for share, part in zip(shares.values(), parts, strict=True))

    return replace(
        parts[0],
        train=train,
        held_out=mixed_held_out([part.held_out.contents for part in parts], counts),
        unigram_entropy=mean("unigram_entropy"),
        bytes_per_token=mean("bytes_per_token"),
        train_tokens=sum(part.train_tokens for part in parts),
        held_out_tokens=sum(part.held_out_tokens for part in parts),
        identity={
            f"{name}/{file}": sha256
            for name, part in zip(names, parts, strict=True)
            for file, sha256 in part.identity.items()
        },
        readable=None,
        shares=shares,
    )


def text_data(
    prepared: TokenCache,
    train: BatchSource,
    held_out: HeldOutExamples,
    tokenizer: TextTokenizer,
    readable: ReadableExamples | None = None,
) -> TextData:
    """Return the text data of prepared tokens, with the statistics of their manifest."""
    manifest = prepared.manifest
    return TextData(
        train=train,
        held_out=held_out,
        tokenizer=tokenizer,
        **{name: manifest[name] for name in ("vocabulary", "unigram_entropy", "bytes_per_token")},
        train_tokens=manifest["tokens"][DataSplit.TRAIN],
        held_out_tokens=manifest["tokens"][DataSplit.HELD_OUT],
        identity={name: file["sha256"] for name, file in manifest["files"].items()},
        folder=prepared.folder,
        readable=readable,
        cautions=cautions_of(prepared),
    )


def _windows(
    prepared: TokenCache, settings: DataSettings, seed: int, say: Callable[[str], None]
) -> tuple[BatchSource, ReadableExamples, HeldOutExamples]:
    train = PackedTokens(prepared.tokens(DataSplit.TRAIN), settings.length, settings.batch, seed)
    return train, train.windows, HeldOutWindows(prepared.tokens(DataSplit.HELD_OUT), settings.length)


def _pairs(
    prepared: TokenCache, settings: DataSettings, seed: int, say: Callable[[str], None]
) -> tuple[BatchSource, ReadableExamples, HeldOutExamples]:
    end = prepared.tokenizer.end_of_text
    train, held_out = (TextPairs(prepared.tokens(part), settings.length, end) for part in DataSplit)
    refuse_less_than_a_batch(settings, len(train), f"has {len(train)} pairs")
    if train.cut:
        say(f"{train.cut:.1%} of the pairs are longer than data.length = {settings.length} and are cut")
    return EpochSource(train, settings.batch, seed), train, HeldOutExamples(held_out)


class PlainText(DataKind):
    """Plain text, cut into windows. It is the default for sources that no other kind recognizes."""

    name, own_settings = "text", ("near_duplicates", "sources", "separate", "held_out_source")
    about, recipe = "plain text", "text"

    def holds(self, settings: DataSettings) -> bool:
        return holds_text(settings.source, settings.column)

    def is_main(self, settings: DataSettings) -> bool:
        columns = first_row(Path(settings.source).expanduser())  # a table of several columns may lack only a name
        return len(columns) < 2 and self.holds(settings)

    def open(self, request: DataRequest) -> tuple[Objective, TextData]:
        settings, objective = request.recipe.data, request.objective
        length = settings.length
        if settings.tokenizer:  # missing special tokens are reported before a large text is tokenized
            objective.with_tokenizer(read_tokenizer(Path(settings.tokenizer).expanduser()), length)
        longer = replace(settings, length=objective.text_length(length))
        opening = open_mixture if settings.sources else open_text
        data = opening(longer, request.recipe.seed, request.say, objective.special_tokens(length))
        objective = objective.with_tokenizer(data.tokenizer, length)
        if settings.separate:
            objective = objective.kept_apart(data.tokenizer.end_of_text)
        return objective, replace(data, held_out=data.held_out.shaped(objective.examples), length=length)


class PairsOfTexts(DataKind):
    """Pairs of source and target texts. Span corruption is not applied."""

    name, own_settings = "text_pairs", ("near_duplicates", "held_out_source")
    about, recipe = "pairs of texts", "spans"

    def holds(self, settings: DataSettings) -> bool:
        return holds_pairs(settings.source)

    def open(self, request: DataRequest) -> tuple[Objective, TextData]:
        settings, cutting = request.recipe.data, request.recipe.objective
        if unused := [name for name in ("rate", "mean_span") if getattr(cutting, name) is not None]:
            raise UsageError(
                f"objective.{unused[0]} is set, but span corruption is not applied to the pairs in {settings.source!r}",
                fix=f"leave objective.{unused[0]} out",
            )
        data = open_text(settings, request.recipe.seed, request.say, pairs=True)
        return request.objective, replace(data, length=settings.length)
