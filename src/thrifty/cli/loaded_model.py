"""Load the model that a verb samples from: of a run folder or of a Hugging Face folder."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from thrifty.core.errors import RefusedError, UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import nn

SEED = click.IntRange(0, 2**63 - 1)


def load_for_sampling(path: Path) -> "tuple[nn.Module, Path, int | None]":
    """The model of a run or of an exported folder, its tokenizer file, and the tokens of context it was made for."""
    if not (path / "config.json").is_file():
        from thrifty.reporting.run_record import find_run

        return _load_run(find_run(path))

    from thrifty.models.text_generation import check_task
    from thrifty.models.weight_conversion import import_folder

    try:
        model, shape = import_folder(path)
        check_task(model)
        return model, path / "tokenizer.json", shape.length
    except RefusedError:  # not one of our two families
        from thrifty.models.hf_loader import load_causal_lm

        return load_causal_lm(path), path / "tokenizer.json", None


def _load_run(run: Path) -> "tuple[nn.Module, Path, int | None]":
    from thrifty.data.tokenizer import read_tokenizer
    from thrifty.models import model_shape
    from thrifty.models.text_generation import check_task
    from thrifty.training.trained_model import load_trained_model

    model, recipe = load_trained_model(run, plain=False)
    check_task(model)
    tokenizer_json, length = run / "tokenizer.json", recipe.data.length
    shape = model_shape(recipe.model, read_tokenizer(tokenizer_json).vocabulary, length)
    return model, tokenizer_json, length if shape is None else shape.length


def read_tokenizer(tokenizer_json: Path, prompt: str) -> "tuple[Tokenizer, list[int], int | None]":
    """The tokenizer, the tokens to start from, and the token that ends a document where there is one."""
    from thrifty.data.tokenizer import KNOWN_ENDS, read_tokenizer_file

    tokenizer = read_tokenizer_file(tokenizer_json)
    ends = (tokenizer.token_to_id(end) for end in KNOWN_ENDS)
    end = next((end for end in ends if end is not None), None)
    start = tokenizer.encode(prompt).ids or ([] if end is None else [end])
    if not start:
        raise UsageError("the tokenizer has no token to begin a document with", fix="give a --prompt")
    return tokenizer, start, end
