"""Identity of the inputs of runs: their data, and the weights of passed modules.

Comparisons, sweeps and lotteries store it, so that later calls refuse other data instead of mixing results.
"""

import hashlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from thrifty.core.errors import ThriftyError, UsageError
from thrifty.core.randomness import draws_of_caller
from thrifty.core.recipe import Recipe
from thrifty.core.secret_redaction import redact
from thrifty.core.state import full_value
from thrifty.training.data_opening import open_first_on_rank_0

WEIGHTS = "weights of "
"""Prefix of the names of hashes of weights."""


def input_identity(recipes: Mapping[str, Recipe], say: Callable[[str], None]) -> dict[str, str]:
    """Return the identity of the data that all recipes share, and a hash of the weights of each passed module. Return
    {} if the data cannot be opened, because the runs report the reason."""
    try:
        with draws_of_caller("cpu"):  # a GPU belongs to the runs
            identity = dict(open_first_on_rank_0(next(iter(recipes.values())), say)[1].identity)
    except (ThriftyError, OSError):
        return {}
    passed = {name: recipe.objects.model for name, recipe in recipes.items()}
    modules = {name: model for name, model in passed.items() if isinstance(model, nn.Module)}
    hashes = {module: _weights_sha256(module) for module in dict.fromkeys(modules.values())}
    return redact(identity | {f"{WEIGHTS}{name}": hashes[module] for name, module in modules.items()})


def refuse_changed_inputs(
    path: Path, before: Mapping[str, str], now: Mapping[str, str], say: Callable[[str], None], is_finished: bool
) -> None:
    """Raise UsageError if two results of `input_identity` differ. Nothing is refused if one of them is empty. If no run
    is left, other weights are only reported, because a script may build another random module at each start."""
    other = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
    if not (before and now and other):
        return
    differing = f"'{path}' was started with other data or weights: {' and '.join(other)} differ"
    if is_finished and all(name.startswith(WEIGHTS) for name in other):
        say(f"caution: {differing}; these are its results")
        return
    raise UsageError(
        differing,
        fix="restore the old data and weights, for example with torch.manual_seed(0) before the model is built; or "
        "choose another --name",
    )


def _weights_sha256(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        if isinstance(tensor, Tensor) and tensor.layout == torch.strided and not (tensor.is_meta or is_lazy(tensor)):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            with suppress(RuntimeError, TypeError):  # quantized tensors of other packages have no bytes to view
                values = full_value(tensor).cpu().resolve_conj().resolve_neg().reshape(-1)
                digest.update(values.view(torch.uint8).numpy())
    return digest.hexdigest()
