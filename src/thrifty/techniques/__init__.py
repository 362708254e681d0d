"""Registry of techniques: each file defines one technique, named by the path of the file.

Third parties register techniques in the entry-point group `thrifty.techniques`, under the technique's name. They may
also list a folder of the same layout in $THRIFTY_TECHNIQUES. Code of third parties is imported only when it is used.
"""

import importlib
import inspect
import os
import pkgutil
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thrifty.core.errors import UsageError, did_you_mean
from thrifty.core.old_names import TECHNIQUES as NEW_NAMES

if TYPE_CHECKING:
    from thrifty.core.technique import Technique

ALIASES = {
    "2:4": "sparsity.n_of_m",
    "accumulate": "large_batch.gradient_accumulation",
    "activation_checkpointing": "memory.recompute",
    "activation_offloading": "memory.offload_activations",
    "albert": "memory.share_parameters",
    "amp": "precision.mixed",
    "autocast": "precision.mixed",
    "bitfit": "adapters.bias_only",
    "data_parallel": "parallelism.replicate",
    "ddp": "parallelism.replicate",
    "flash_attention": "attention.tiled",
    "fp8": "precision.float8",
    "fsdp": "parallelism.shard",
    "gradient_checkpointing": "memory.recompute",
    "gradient_clipping": "gradients.clip",
    "lawa": "averaging.latest",
    "linear_probing": "adapters.head_only",
    "llrd": "optimizers.layerwise_lr_decay",
    "mixed_precision": "precision.mixed",
    "pipeline_parallel": "parallelism.pipeline",
    "pp": "parallelism.pipeline",
    "tensor_parallel": "parallelism.tensor",
    "torch_compile": "compile",
    "tp": "parallelism.tensor",
    "wsd": "schedules.constant_then_decay",
    "zero": "parallelism.shard",
    "zero_offload": "memory.offload_optimizer",
}
"""Full names of techniques by common name (alias). The unique last part of a full name is accepted too."""
HINTS = {
    "1f1b": "parallelism.pipeline",
    "bf16": "precision.mixed:format=bfloat16",
    "dora": "adapters.lora",
    "fp16": "precision.mixed:format=float16",
    "galore": "adapters.lora",
    "gpipe": "parallelism.pipeline:schedule=gpipe",
    "qlora": "adapters.lora",
    "rslora": "adapters.lora:rank_stabilized=true",
    "swa": "averaging.latest",  # LAWA averages the latest weights, SWA all of them
    "zero1": "parallelism.shard:zero=1",
    "zero2": "parallelism.shard:zero=2",
    "zero3": "parallelism.shard:zero=3",
}
"""Suggested techniques by the name of a related method or setting. These names do not select a technique."""

_OWN = list(__path__)
for _folder in filter(None, os.environ.get("THRIFTY_TECHNIQUES", "").split(os.pathsep)):
    __path__.append(str(Path(_folder).resolve()))


def _walk(paths: list[str], prefix: str = "") -> list[str]:
    names: list[str] = []
    for module in pkgutil.iter_modules(paths):
        if module.name.startswith("_"):
            continue  # private to its group
        if module.ispkg:
            names += _walk([str(Path(path, module.name)) for path in paths], f"{prefix}{module.name}.")
        else:
            names.append(prefix + module.name)
    return names


def own_names() -> list[str]:
    """Return the names of this package's techniques, without third-party techniques."""
    return _walk(_OWN)


def source_file(name: str) -> Path | None:
    """Return the Python file of a technique, or None if the technique comes from an entry point."""
    files = (Path(folder, *name.split(".")).with_suffix(".py") for folder in __path__)
    return next((file for file in files if file.exists()), None)


def third_party() -> dict[str, EntryPoint]:
    """Return the entry points of third-party techniques by name, without loading them. Names of technique files are
    left out."""
    files = set(_walk(list(__path__)))
    return {entry.name: entry for entry in _installed() if entry.name not in files}


@cache
def _installed() -> EntryPoints:
    """Return the installed entry points, cached because reading them is slow."""
    return entry_points(group="thrifty.techniques")


def names() -> list[str]:
    """Return the names of all techniques, sorted, without importing the techniques."""
    return sorted(set(_walk(list(__path__))) | third_party().keys())


@cache
def full_name(word: str) -> str:
    """Return the full name of a technique. `word` is a full name, an alias (`fsdp`) or an unambiguous last part
    (`lion`).

    Raise UsageError with the nearest name, or with all candidates if the word is ambiguous.
    """
    known = names()
    if word in known or word in ALIASES:
        return ALIASES.get(word, word)
    ending = [name for name in known if name.endswith(f".{word}")]
    if len(ending) == 1:
        return ending[0]
    if ending:
        raise UsageError(f"the technique name {word!r} is ambiguous", fix=f"write {'; or '.join(ending)}")
    near = HINTS.get(word) or NEW_NAMES.get(word)
    words = [*known, *ALIASES, *(name.rpartition(".")[2] for name in known)]
    hint = f"did you mean {near!r}?" if near else did_you_mean(word, words, "thrifty list shows them")
    raise UsageError(f"there is no technique {word!r}", fix=hint)


def is_name(word: str) -> bool:
    """Return True if `full_name` accepts the word."""
    with suppress(UsageError):
        return bool(full_name(word))
    return False


def split_settings(words: str) -> tuple[str, str]:
    """Split `name:key=value,key=value` into the technique's full name and its settings."""
    longest = max((alias for alias in ALIASES if f"{words}:".startswith(f"{alias}:")), key=len, default="")
    name, _, settings = (longest, "", words[len(longest) + 1 :]) if longest else words.partition(":")
    return full_name(name), settings


@cache
def find(name: str) -> "type[Technique]":
    """Return the class of a technique. `name` is read by `full_name`, which raises UsageError for unknown names."""
    from thrifty.core.technique import Technique  # imports torch, which lists of names do not require

    name = full_name(name)
    if name not in _walk(list(__path__)):
        technique = _imported(name, third_party()[name].load)
        technique.name = name
        return technique
    *group, _ = name.split(".")
    if group:
        package = importlib.import_module(f"{__name__}.{'.'.join(group)}")
        package.__path__ = [str(Path(path, *group)) for path in __path__ if Path(path, *group).is_dir()]
    module = _imported(name, lambda: importlib.import_module(f"{__name__}.{name}"))
    classes = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Technique) and value.__module__ == module.__name__
    ]
    if len(classes) != 1:
        what = f"'{module.__file__}' defines {len(classes)} subclasses of Technique, not one"
        raise UsageError(what, fix="define exactly one subclass of Technique in the file")
    return classes[0]


def _imported(name: str, load: Callable[[], Any]) -> Any:
    """Call `load` and return its result. Raise UsageError if the code of a third party fails."""
    try:
        return load()
    except Exception as error:
        if name in own_names():
            raise
        where = source_file(name) or third_party()[name].value
        what = f"the technique {name!r} cannot be imported: {type(error).__name__}: {error}"
        raise UsageError(what, fix=f"correct '{where}'; or leave {name} out") from error
