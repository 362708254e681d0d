"""A model folder in Hugging Face format: config.json, safetensors weights, tokenizer files.

Folders are read and written without `transformers`. Pickled weights (.bin, .pt) are never opened.
"""

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, processors
from torch import Tensor

from thrifty.core.atomic_folders import write_aside
from thrifty.core.errors import IntegrityError, ThriftyError, UsageError
from thrifty.core.tokenizer_files import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    KNOWN_ENDS,
    START_OF_TEXT,
    TOKENIZER_CONFIG,
    joins_words,
)

_SPELLED = {
    "bos_token": (END_OF_TEXT,),
    "eos_token": KNOWN_ENDS,
    "pad_token": ("<pad>", "[PAD]", "<|pad|>", "<|padding|>"),
    "mask_token": ("<mask>", "[MASK]", "<|mask|>"),
    "cls_token": ("[CLS]",),
    "sep_token": ("[SEP]",),
    "unk_token": ("<unk>", "[UNK]"),
}
"""Roles of special tokens in transformers, with their usual texts in tokenizers. The most reliable text is first."""
_KEPT = ("chat_template", "padding_side", "truncation_side", "clean_up_tokenization_spaces")
"""Settings of a pretrained tokenizer that an exported tokenizer keeps, in addition to the special tokens."""
_ENDED = ("contrastive", "sequence_to_sequence")
"""Tasks whose training ends each text with the end-of-text token, and pads with it."""


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise IntegrityError(f"'{path}' cannot be read as JSON: {error}", fix="fetch the model folder again") from error
    if not isinstance(content, dict):
        raise IntegrityError(f"{str(path)!r} contains no JSON object", fix="fetch the model folder again")
    return content


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json of a model folder. Raise UsageError if the file is missing."""
    if not folder.is_dir():
        raise UsageError(
            f"there is no model folder {str(folder)!r}", fix="pass a folder that contains config.json and safetensors"
        )
    file = folder / "config.json"
    if not file.is_file():
        raise UsageError(f"{str(folder)!r} has no config.json", fix="pass the folder that contains config.json")
    state = file.stat()
    config = deepcopy(_read_config(file, state.st_ino, state.st_size, state.st_mtime_ns))
    if not isinstance(kind := config.get("model_type", ""), str):
        raise UsageError(
            f"{file}: model_type is {kind!r:.80}",
            fix='name one family, such as "model_type": "llama"',
        )
    return config


@lru_cache(8)
def _read_config(file: Path, *state: int) -> dict[str, Any]:
    """Read config.json, cached while `state` is unchanged, because a run reads it a dozen times before the first
    step."""
    return read_json(file)


def image_sizes(config: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return the sides of images and patches in pixels by config.json; None for a size that is not there, or for
    images or patches that are not square."""
    visual = config.get("vision_config") or config
    return tuple(_side(visual.get(name)) for name in ("image_size", "patch_size"))  # type: ignore[return-value]


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder, whole or sharded. Raise UsageError if there are no safetensors
    files."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if index.is_file():
        return _shards(index)
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in {".bin", ".pt", ".pth"})
    if pickles:
        raise UsageError(
            f"{str(folder)!r} has its weights in the pickle {pickles[0]!r}, which can run any code when opened",
            fix="if you trust the origin, convert the weights to safetensors and pass the converted folder",
        )
    raise UsageError(
        f"{str(folder)!r} has no model.safetensors", fix="pass a folder with weights; or set model.reinitialize = true"
    )


def _shards(index: Path) -> list[Path]:
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise IntegrityError(f"{str(index)!r} has no weight_map", fix="fetch the model folder again")
    paths = [index.parent / name for name in sorted(set(names.values()))]
    for path in paths:
        if path.parent != index.parent or path.suffix != ".safetensors":
            raise UsageError(f"'{index}' names {path.name!r}, which is no shard name", fix="fetch the file again")
        if not path.is_file():
            raise IntegrityError(f"{str(index)!r} names {path.name!r}, which is missing", fix="fetch the missing shard")
    return paths


class StoredTensors:
    """The tensors of a folder by name, each read from disk on access."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._files = {}
        self._open = ExitStack()
        for path in weight_files(folder):
            try:
                file = self._open.enter_context(safe_open(path, "pt"))
            except (SafetensorError, OSError) as error:
                raise IntegrityError(f"{str(path)!r} is damaged: {error}", fix="fetch the file again") from error
            self._files.update(dict.fromkeys(file.keys(), file))

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def __getitem__(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)

    def __enter__(self) -> "StoredTensors":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()


@contextmanager
def written_aside(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `folder` once all files are on disk. Raise UsageError if `folder`
    exists and is not empty. After a failure the temporary folder is removed."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"'{folder}' exists already", fix="choose a new folder; or remove this folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with write_aside(folder) as aside:
            yield aside
            readable = (
                aside.stat().st_mode & 0o666
            )  # by the user's umask; safetensors makes files readable by the owner only
            for path in aside.iterdir():
                path.chmod(readable)
    except (OSError, SafetensorError) as error:
        raise ThriftyError(
            f"{str(folder)!r} could not be written: {error}", fix="free disk space; or choose another folder"
        ) from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_weights(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})


def special_tokens(tokenizer_json: Path) -> dict[str, tuple[str, int]]:
    """Return text and id of a tokenizer's known special tokens, by role. tokenizer_config.json in the same folder has
    priority, because in a chat model the end-of-text token is the end of a turn."""
    added = {token["content"]: token["id"] for token in read_json(tokenizer_json).get("added_tokens", [])}
    stated, tokens = _settings_of(tokenizer_json), {}
    for part, words in _SPELLED.items():
        own = stated.get(part)
        candidates = (own["content"] if isinstance(own, dict) else own, *words)
        tokens[part] = next((word for word in candidates if word in added), None)
    return {part: (word, added[word]) for part, word in tokens.items() if word is not None}


def _settings_of(tokenizer_json: Path) -> dict[str, Any]:
    config = tokenizer_json.with_name(TOKENIZER_CONFIG)
    return read_json(config) if config.is_file() else {}


def special_ids(tokenizer_json: Path | None, task: str) -> dict[str, int | None]:
    """Return the ids of special tokens that config.json stores for a model of `task`; None for tokens that the
    tokenizer lacks. The decoder's start token is the end-of-text token, as in Thrifty's sequence-to-sequence objective.
    """
    numbers = {} if tokenizer_json is None else {part: id for part, (_, id) in special_tokens(tokenizer_json).items()}
    end = numbers.get("eos_token")
    ids = {"bos_token_id": numbers.get("bos_token"), "eos_token_id": end}
    if task == "masked_token":
        ids["pad_token_id"] = numbers.get("pad_token")
    elif task == "sequence_to_sequence":
        ids["pad_token_id"] = numbers.get("pad_token", end)
        if end is not None:
            ids["decoder_start_token_id"] = end
    return ids


def generation_settings(base: Mapping[str, Any], ids: Mapping[str, int | None]) -> dict[str, Any]:
    """Return generation_config.json: the settings of the base model with the special tokens `ids`. A list of stop
    tokens that contains the end-of-text or end-of-turn token is kept."""
    settings = dict(base)
    for name, number in ids.items():
        known = settings.get(name)
        if number is not None and number != known and not (isinstance(known, list) and number in known):
            settings[name] = number
    return settings


def write_tokenizer(folder: Path, tokenizer_json: Path, length: int, task: str, token_types: int = 0) -> None:
    """Write tokenizer.json, tokenizer_config.json for `AutoTokenizer`, and the tokenizer's chat template if there is
    one. `token_types` is the model's `type_vocab_size`: with several, `AutoTokenizer` marks the second text of a
    pair. `AutoTokenizer` adds the tokens that training for `task` adds to a text."""
    special = {part: word for part, (word, _) in special_tokens(tokenizer_json).items()}
    if task in _ENDED and (end := special.get("eos_token")):
        special.setdefault("pad_token", end)
        (folder / "tokenizer.json").write_text(_ended(tokenizer_json, task, end), encoding="utf-8")
    elif task == "token_classification":
        (folder / "tokenizer.json").write_text(_spaced(tokenizer_json), encoding="utf-8")
    else:
        shutil.copyfile(tokenizer_json, folder / "tokenizer.json")
    template = tokenizer_json.with_name(CHAT_TEMPLATE)
    if template.is_file():
        shutil.copyfile(template, folder / CHAT_TEMPLATE)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": length}
    if token_types > 1:
        settings["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    settings |= {"clean_up_tokenization_spaces": False, **special}
    stated = _settings_of(tokenizer_json)
    kept = {name: stated[name] for name in _KEPT if name in stated}
    write_json(folder / TOKENIZER_CONFIG, settings | kept)


def _ended(tokenizer_json: Path, task: str, end: str) -> str:
    """Return a tokenizer.json that adds the token `end` after a text, and for captions the start of text before. It
    adds no other token, because training does not."""
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    numbers = {word: tokenizer.token_to_id(word) for word in (START_OF_TEXT, end)}
    first = [START_OF_TEXT] if task == "contrastive" and numbers[START_OF_TEXT] is not None else []
    one, two = [*first, "$A", end], [*first, "$A", end, "$B", end]
    special = [(word, numbers[word]) for word in (*first, end)]
    tokenizer.post_processor = processors.TemplateProcessing(one, two, special)
    return tokenizer.to_str(pretty=True)


def _spaced(tokenizer_json: Path) -> str:
    """Return a tokenizer.json that adds the space before each word if it is byte-level, as training on words does."""
    content, space = read_json(tokenizer_json), {"type": "Prepend", "prepend": " "}
    own = content.get("normalizer")
    if joins_words(content):
        content["normalizer"] = space if own is None else {"type": "Sequence", "normalizers": [own, space]}
    return json.dumps(content, indent=2, ensure_ascii=False)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the progress bars of transformers, and its report of missing weights, which the caller checks."""
    if "transformers" not in sys.modules:
        yield
        return
    from transformers.utils import logging

    before, had_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if had_bar:
            logging.enable_progress_bar()


def _side(size: Any) -> int | None:
    if isinstance(size, int):
        return size
    return size[0] if isinstance(size, list | tuple) and len({*size}) == 1 else None
