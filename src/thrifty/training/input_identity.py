"""Identity of the inputs of runs: their data, and the weights of passed modules.

Comparisons, sweeps and lotteries store it, so that later calls refuse other data instead of mixing results.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from thrifty.core.errors import ThriftyError, UsageError
from thrifty.core.randomness import draws_of_caller
from thrifty.core.recipe import Recipe
from thrifty.core.secret_redaction import redact
from thrifty.training.data_opening import open_first_on_rank_0


def input_identity(recipes: Mapping[str, Recipe]) -> dict[str, str]:
    """Return the identity of the data that all recipes share, and a hash of the weights of each passed module. Return
    {} if the data cannot be opened, because the runs report the reason."""
    first = next(iter(recipes.values()))
    try:
        with draws_of_caller(first.device):
            identity = dict(open_first_on_rank_0(first, lambda text: None)[1].identity)
    except (ThriftyError, OSError):
        return {}
    passed = {name: recipe.objects.model for name, recipe in recipes.items()}
    modules = {name: model for name, model in passed.items() if isinstance(model, nn.Module)}
    hashes = {module: _weights_sha256(module) for module in dict.fromkeys(modules.values())}
    return redact(identity | {f"weights of {name}": hashes[module] for name, module in modules.items()})


def refuse_changed_inputs(path: Path, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raise UsageError if two results of `input_identity` differ. Nothing is refused if one of them is empty."""
    if not (before and now):
        return
    if other := [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]:
        raise UsageError(
            f"'{path}' was started with other data or weights: {' and '.join(other)} differ",
            fix="restore the old data and weights; or choose another --name",
        )


def _weights_sha256(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        if isinstance(tensor, Tensor) and tensor.layout == torch.strided and not (tensor.is_meta or is_lazy(tensor)):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
