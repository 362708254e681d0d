"""`thrifty sample`: text from a trained model."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from tokenizers import Tokenizer
from thrifty.cli.loaded_model import SEED, load_for_sampling, read_tokenizer


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
@click.option("--seed", default=0, type=SEED, show_default=True, help="The same seed gives the same text.")
@click.option("--chat", is_flag=True, help="Put the prompt as a question, by the chat template; print the answer only.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    path: Path, prompt: str, tokens: int, temperature: float, top_k: int | None, seed: int, chat: bool, as_json: bool
) -> None:
    """Continue a prompt with the model of a run (its folder, or its name under runs/) or of a Hugging Face folder."""
    import time

    import torch

    from thrifty.cli.verb_output import print_json
    from thrifty.core.setting_bounds import check_plain
    from thrifty.models.text_generation import generate

    check_plain(prompt, "--prompt")
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


def read_question(tokenizer_json: Path, prompt: str) -> "tuple[Tokenizer, list[int], int]":
    """The same for a prompt that is put as a question: the tokens up to its answer, and the one that ends answers."""
    from thrifty.core.errors import UsageError
    from thrifty.data.chat.chat_tokenizer import read_chat_tokenizer

    if not prompt:
        raise UsageError("there is no question", fix="give a --prompt")
    chat = read_chat_tokenizer(tokenizer_json)
    return chat.inner, chat.prompt([{"role": "user", "content": prompt}]), chat.end_of_turn
