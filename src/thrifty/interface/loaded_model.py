"""Loading of trained language models and their tokenizers from a run folder or a Hugging Face folder."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torch import nn

from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.tokenizer_files import KNOWN_ENDS
from thrifty.core.user_objects import BuildModel, UserObjects
from thrifty.data.chat.chat_tokenizer import read_chat_tokenizer
from thrifty.data.tokenizer import read_tokenizer, read_tokenizer_file
from thrifty.models import model_shape
from thrifty.models.hf_loader import load_causal_lm
from thrifty.models.text_generation import check_task, context_limit
from thrifty.models.weight_conversion import import_folder
from thrifty.reporting.run_record import run_folder
from thrifty.training.checkpoint_index import CheckpointChoice
from thrifty.training.trained_model import load_trained_model


def own_model(run: Any, model: nn.Module | BuildModel | str | None) -> UserObjects:
    """Return the passed model, or else the user's own model, if the run trained it in this
    process.
    """
    return getattr(run, "objects", UserObjects()) if model is None else UserObjects.from_arguments(model=model)


def load_for_sampling(
    source: Any, objects: UserObjects, checkpoint: CheckpointChoice = "last"
) -> tuple[nn.Module, Path, int | None]:
    """Return the model of a run or a Hugging Face folder, its tokenizer file, and its context length in tokens. Raise
    UsageError if a checkpoint of a Hugging Face folder is chosen."""
    path = Path(getattr(source, "folder", source))
    if not (path / "config.json").is_file():
        return _load_run(run_folder(source), objects, checkpoint)
    if checkpoint != "last":
        what = f"'{path}' is a Hugging Face folder without checkpoints, so there is no checkpoint '{checkpoint}'"
        raise UsageError(what, fix="leave out the checkpoint; or pass a run folder")
    try:
        model, shape = import_folder(path)
        check_task(model)
        return model, path / "tokenizer.json", shape.length
    except RefusedError:  # not an architecture that Thrifty implements
        wrapped = load_causal_lm(path)
        return wrapped, path / "tokenizer.json", context_limit(wrapped)


def _load_run(run: Path, objects: UserObjects, checkpoint: CheckpointChoice) -> tuple[nn.Module, Path, int | None]:
    model, recipe = load_trained_model(run, checkpoint, plain=False, objects=objects)
    check_task(model)
    tokenizer_json, length = run / "tokenizer.json", recipe.data.length
    if recipe.objects.model is not None:
        return model, tokenizer_json, length
    shape = model_shape(recipe.model, read_tokenizer(tokenizer_json).vocabulary, length)
    return model, tokenizer_json, shape.length if shape is not None else context_limit(model) or length


def read_prompt(tokenizer_json: Path, prompt: str) -> tuple[Tokenizer, list[int], int | None]:
    """Return the tokenizer, the tokens of the prompt, and the end-of-document token or None."""
    tokenizer = read_tokenizer_file(tokenizer_json)
    ends = (tokenizer.token_to_id(end) for end in KNOWN_ENDS)
    end = next((end for end in ends if end is not None), None)
    start = tokenizer.encode(prompt).ids or ([] if end is None else [end])
    if not start:
        raise UsageError("the tokenizer has no token to start a document", fix="--prompt 'Once upon a time'")
    return tokenizer, start, end


def read_question(tokenizer_json: Path, prompt: str) -> tuple[Tokenizer, list[int], int]:
    """Return the tokenizer, the prompt tokens up to the start of the answer, and the token that ends an answer."""
    if not prompt:
        raise UsageError("the question is empty", fix="--prompt 'Who are you?'")
    chat = read_chat_tokenizer(tokenizer_json)
    return chat.inner, chat.prompt([{"role": "user", "content": prompt}]), chat.end_of_turn
