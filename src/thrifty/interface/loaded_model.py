"""Trained language models with their tokenizers, from a run folder or a Hugging Face folder."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torch import nn

from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.user_objects import BuildModel, UserObjects
from thrifty.data.chat.chat_tokenizer import read_chat_tokenizer
from thrifty.data.tokenizer import KNOWN_ENDS, read_tokenizer, read_tokenizer_file
from thrifty.interface.run_reports import run_folder
from thrifty.models import model_shape
from thrifty.models.hf_loader import load_causal_lm
from thrifty.models.text_generation import check_task
from thrifty.models.weight_conversion import import_folder
from thrifty.training.trained_model import load_trained_model


def own_model(run: Any, model: nn.Module | BuildModel | str | None) -> UserObjects:
    """Return the user's own model: the passed one, or the one that trained the run in this process."""
    return getattr(run, "objects", UserObjects()) if model is None else UserObjects.from_arguments(model=model)


def load_for_sampling(source: Any, objects: UserObjects) -> tuple[nn.Module, Path, int | None]:
    """Return the model of a run or of a Hugging Face folder, its tokenizer file, and the tokens of its context."""
    path = Path(getattr(source, "folder", source))
    if not (path / "config.json").is_file():
        return _load_run(run_folder(source), objects)
    try:
        model, shape = import_folder(path)
        check_task(model)
        return model, path / "tokenizer.json", shape.length
    except RefusedError:  # not one of our two families
        return load_causal_lm(path), path / "tokenizer.json", None


def _load_run(run: Path, objects: UserObjects) -> tuple[nn.Module, Path, int | None]:
    model, recipe = load_trained_model(run, plain=False, objects=objects)
    check_task(model)
    tokenizer_json, length = run / "tokenizer.json", recipe.data.length
    if recipe.objects.model is not None:
        return model, tokenizer_json, length
    shape = model_shape(recipe.model, read_tokenizer(tokenizer_json).vocabulary, length)
    return model, tokenizer_json, length if shape is None else shape.length


def read_prompt(tokenizer_json: Path, prompt: str) -> tuple[Tokenizer, list[int], int | None]:
    """Return the tokenizer, the tokens of the prompt, and the token that ends a document, if there is one."""
    tokenizer = read_tokenizer_file(tokenizer_json)
    ends = (tokenizer.token_to_id(end) for end in KNOWN_ENDS)
    end = next((end for end in ends if end is not None), None)
    start = tokenizer.encode(prompt).ids or ([] if end is None else [end])
    if not start:
        raise UsageError("the tokenizer has no token that begins a document", fix="give a --prompt")
    return tokenizer, start, end


def read_question(tokenizer_json: Path, prompt: str) -> tuple[Tokenizer, list[int], int]:
    """Return the tokenizer, the tokens of a question up to its answer, and the token that ends answers."""
    if not prompt:
        raise UsageError("the question is empty", fix="give a --prompt")
    chat = read_chat_tokenizer(tokenizer_json)
    return chat.inner, chat.prompt([{"role": "user", "content": prompt}]), chat.end_of_turn
