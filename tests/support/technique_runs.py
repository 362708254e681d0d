"""The plain run that a technique can work on: of text, unless it needs other data."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from image_runs import autoencoder_run, image_run
from pair_runs import pair_run
from tiny_runs import VOCABULARY, Repeated, corpus, plain_run, tiny_model

from thrifty.composition.compose import BaseRun
from thrifty.core.batches import BatchSource
from thrifty.data.text.token_windows import PackedTokens
from thrifty.objectives.masked_token import MaskedToken


def masked_run(batch: int = 4, repeated: bool = False, dropout: float = 0.0, length: int = 16) -> BaseRun:
    """A BERT of bytes that fills in half of a text; byte 0, which no text has, hides the others."""
    source: BatchSource = PackedTokens(corpus(), length, batch, seed=0)
    objective = MaskedToken(rate=0.5, mask=0, vocabulary=VOCABULARY, special=frozenset({0}))
    return BaseRun(
        lambda: tiny_model(style="bert", dropout=dropout), Repeated(source) if repeated else source, objective
    )


def untied_run(**settings: Any) -> BaseRun:
    """Return a run on text with a model whose head has its own weight."""
    return plain_run(tied=False, **settings)


RUNS: Mapping[str, Callable[..., BaseRun]] = {
    "adapters.head_only": untied_run,
    "data_selection.drop_masked_patches": autoencoder_run,
    "data_selection.drop_masked_tokens": masked_run,
    "data_selection.drop_patches": image_run,
    "curriculum.low_frequency": image_run,
    "curriculum.patch_size": image_run,
    "curriculum.resolution": image_run,
    "large_batch.gradient_cache": pair_run,
}
"""By technique, for those that are for other data. Each takes `batch`, `repeated` and `dropout` like `plain_run`."""


def plain_for(*names: str, style: str = "llama", **settings: Any) -> BaseRun:
    """A tiny run for techniques of these names; the test is skipped where there is none for all of them. `style` is
    that of a model of text, where such a one will do."""
    needed = {RUNS[name] for name in names if name in RUNS}
    if len(needed) > 1:
        pytest.skip("they are for different data")
    return needed.pop()(**settings) if needed else plain_run(style=style, **settings)
