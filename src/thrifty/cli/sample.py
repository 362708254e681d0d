"""`thrifty sample`: text from a trained model."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import nn


@click.command()
@click.argument("path", metavar="RUN_OR_FOLDER", type=click.Path(path_type=Path))
@click.option("--prompt", default="", help="Text to continue; without it the model begins a document.")
@click.option(
    "--tokens", default=200, show_default=True, type=click.IntRange(min=1), help="At most this many new tokens."
)
@click.option(
    "--temperature", default=0.8, show_default=True, type=click.FloatRange(min=0), help="0 takes the likeliest token."
)
@click.option("--top-k", default=None, type=click.IntRange(min=1), help="Draw among the k likeliest tokens only.")
@click.option("--seed", default=0, show_default=True, help="The same seed gives the same text.")
@click.option("--chat", is_flag=True, help="Put the prompt as a question, by the chat template; print the answer only.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    path: Path, prompt: str, tokens: int, temperature: float, top_k: int | None, seed: int, chat: bool, as_json: bool
) -> None:
    """Continue a prompt with the model of a run (its folder, or its name under runs/) or of a Hugging Face folder."""
    import time

    import torch

    from thrifty.cli.verb_output import print_json
    from thrifty.models.text_generation import generate

    model, tokenizer_json, context = load_for_sampling(path)
    tokenizer, start, end = (read_question if chat else read_tokenizer)(tokenizer_json, prompt)
    device = next(model.parameters()).device
    began = time.perf_counter()
    ids = generate(
        model,
        torch.tensor([start], device=device),
        tokens,
        temperature=temperature or 1.0,
        top_k=top_k,
        seed=seed,
        greedy=temperature == 0,
        context=context,
        stop=end,
    )[0].tolist()
    seconds = time.perf_counter() - began
    text = tokenizer.decode(ids[len(start) :] if chat else ids)
    if not as_json:
        click.echo(text)
        return
    answer = {
        "path": str(path),
        "prompt": prompt,
        "text": text,
        "new_tokens": ids[len(start) :],
        "temperature": temperature,
        "top_k": top_k,
        "seed": seed,
        "seconds": seconds,
    }
    print_json(answer)


def load_for_sampling(path: Path) -> "tuple[nn.Module, Path, int | None]":
    """The model of a run or of an exported folder, its tokenizer file, and the tokens of context it was made for."""
    if not (path / "config.json").is_file():
        from thrifty.cli.verb_output import run_path

        return _load_run(run_path(path))

    from thrifty.core.errors import Refused
    from thrifty.models.text_generation import check_task
    from thrifty.models.weight_conversion import import_folder

    try:
        model, shape = import_folder(path)
        check_task(model)
        return model, path / "tokenizer.json", shape.length
    except Refused:  # not one of our two families
        from thrifty.models.hf_loader import load_causal_lm

        return load_causal_lm(path), path / "tokenizer.json", None


def _load_run(run: Path) -> "tuple[nn.Module, Path, int | None]":
    from thrifty.data.tokenizer import read_tokenizer
    from thrifty.models import model_shape
    from thrifty.models.text_generation import check_task
    from thrifty.training.trained_model import restore

    model, recipe = restore(run, plain=False)
    check_task(model)
    tokenizer_json, length = run / "tokenizer.json", recipe.data.length
    shape = model_shape(recipe.model, read_tokenizer(tokenizer_json).vocabulary, length)
    return model, tokenizer_json, length if shape is None else shape.length


def read_tokenizer(tokenizer_json: Path, prompt: str) -> "tuple[Tokenizer, list[int], int | None]":
    """The tokenizer, the tokens to start from, and the token that ends a document where there is one."""
    from tokenizers import Tokenizer

    from thrifty.core.errors import UsageError
    from thrifty.models.hf_folder import END_OF_TEXT

    if not tokenizer_json.is_file():
        raise UsageError(f"there is no tokenizer {tokenizer_json}", fix="put the model's tokenizer.json in its folder")
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    end = tokenizer.token_to_id(END_OF_TEXT)
    start = tokenizer.encode(prompt).ids or ([] if end is None else [end])
    if not start:
        raise UsageError("the tokenizer has no token to begin a document with", fix="give a --prompt")
    return tokenizer, start, end


def read_question(tokenizer_json: Path, prompt: str) -> "tuple[Tokenizer, list[int], int]":
    """The same for a prompt that is put as a question: the tokens up to its answer, and the one that ends answers."""
    from thrifty.core.errors import UsageError
    from thrifty.data.chat.chat_tokenizer import read_chat_tokenizer

    if not prompt:
        raise UsageError("there is no question", fix="give a --prompt")
    chat = read_chat_tokenizer(tokenizer_json)
    return chat.inner, chat.prompt([{"role": "user", "content": prompt}]), chat.end_of_turn
