"""Names of a model's layers and parameters in its exported folder.

A model of transformers keeps its own names. A model of Thrifty's families is exported under other names, and its fused
layers are exported as several layers. The family's packing table lists the exported names and the fused layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from thrifty.core.errors import IntegrityError, RefusedError, UsageError
from thrifty.modeling.layer_shapes import is_transposed
from thrifty.modeling.lora_layers import parameter_names, weight_name
from thrifty.modeling.lora_model import adapters
from thrifty.modeling.module_surgery import tied_names
from thrifty.models.families import FAMILIES
from thrifty.models.families.model_family import ParameterPacking
from thrifty.models.model_config import ModelConfig
from thrifty.models.transformer import Encoder, EncoderDecoder, Transformer
from thrifty.models.weight_conversion import packing_table


@dataclass(frozen=True)
class LayerTarget:
    """Exported layers of one layer of Thrifty: a single layer, or several layers that Thrifty fuses. `rows` are the
    numbers of outputs of the exported layers.
    """

    theirs: tuple[str, ...]
    rows: tuple[int, ...]
    transposed: bool
    """True if the exported weight is stored as (in, out)."""


def misfit(what: str) -> IntegrityError:
    return IntegrityError(what, fix="load the adapter onto the model on which it was trained")


class LayerNaming:
    """Mapping between a model's parameters and their exported names. Raise UsageError if a model of Thrifty's families
    is passed without its shape."""

    def __init__(self, model: nn.Module, shape: ModelConfig | None):
        self.model = model
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.repeated: frozenset[str]
        """Exported names that several exported modules share, because Thrifty's model has a single parameter for them.
        """
        if isinstance(model, Transformer | Encoder | EncoderDecoder):
            if shape is None:
                raise UsageError(
                    "the exported names of this model depend on its shape",
                    fix="pass shape=CONFIG, the ModelConfig of the model",
                )
            family = FAMILIES[shape.style]
            packings = packing_table(shape)
            self.repeated = frozenset(family.aliases.values())
            self.aliases = dict(family.aliases) | ({family.head: family.token} if shape.tied else {})
        else:
            factors = {each for name in adapters(model) for each in parameter_names(name)}
            packings = [
                ParameterPacking(name, (name,)) for name in self.parameters if name.rpartition(".")[2] not in factors
            ]
            self.repeated = frozenset()
            self.aliases = tied_names(model)
        self.packings = {packing.ours: packing for packing in packings}

    @cached_property
    def modules(self) -> set[str]:
        """Every exported module with parameters, at any depth."""
        names = [*self.aliases, *(name for packing in self.packings.values() for name in packing.theirs)]
        paths = [name.split(".")[:-1] for name in names]
        return {".".join(path[:end]) for path in paths for end in range(1, len(path) + 1)}

    def place(self, path: str) -> LayerTarget:
        """Return the exported layers of a layer of the model."""
        layer = self.model.get_submodule(path)
        packing = self.packings[f"{path}.{weight_name(layer)}"]
        theirs = tuple(name.rpartition(".")[0] for name in packing.theirs)
        return LayerTarget(theirs, packing.rows, packing.transposed or is_transposed(layer))

    @cached_property
    def layers(self) -> dict[str, tuple[str, int]]:
        """For each exported layer, the name of the model's layer and the index of the part in it."""
        places: dict[str, tuple[str, int]] = {}
        for name, packing in self.packings.items():
            path, _, last = name.rpartition(".")
            if last == weight_name(self.model.get_submodule(path)):
                places |= {theirs.rpartition(".")[0]: (path, index) for index, theirs in enumerate(packing.theirs)}
        return places

    def holders(self, parameter: str) -> set[str]:
        """Return the exported modules that contain a parameter of the model, under any of its names."""
        theirs = set(self.packings[parameter].theirs)
        theirs |= {alias for alias, name in self.aliases.items() if name in theirs}
        return {name.rpartition(".")[0] for name in theirs}

    def values(self, module: str) -> dict[str, Tensor]:
        """Return every parameter inside an exported module, under its exported name."""
        tensors: dict[str, Tensor] = {}
        for packing in self.packings.values():
            aliases = {alias: name for alias, name in self.aliases.items() if name in packing.theirs}
            if any(name.startswith(f"{module}.") for name in (*packing.theirs, *aliases)):
                parts = packing.unpack(self.parameters[packing.ours].detach())
                tensors |= parts | {alias: parts[name] for alias, name in aliases.items()}
        return {name: tensor for name, tensor in tensors.items() if name.startswith(f"{module}.")}

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, Tensor]) -> list[nn.Parameter]:
        """Write values to parameters by their exported names. Return the changed parameters. Raise IntegrityError for
        an unknown name or a wrong shape. Raise RefusedError if several names of one tensor have different values."""
        known = {name for packing in self.packings.values() for name in packing.theirs} | self.aliases.keys()
        if unknown := sorted(tensors.keys() - known):
            raise misfit(f"the model has no parameters {unknown[:3]}")
        resolved = {self.aliases.get(name, name): tensor for name, tensor in tensors.items()}
        self._refuse_untied(tensors, resolved)
        changes: list[tuple[nn.Parameter, Tensor]] = []
        for packing in self.packings.values():
            if resolved.keys() & set(packing.theirs):
                parameter = self.parameters[packing.ours]
                parts = packing.unpack(parameter.detach())
                parts |= {name: resolved[name].to(parameter) for name in packing.theirs if name in resolved}
                changes.append((parameter, packing.pack([*parts.values()])))
                if changes[-1][1].shape != parameter.shape:
                    raise misfit(
                        f"{packing.ours} would be {tuple(changes[-1][1].shape)} instead of {tuple(parameter.shape)}"
                    )
        for parameter, value in changes:
            parameter.copy_(value)
        return [parameter for parameter, _ in changes]

    def _refuse_untied(self, tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
        for alias, name in self.aliases.items():
            if name not in wanted:
                continue
            values = [tensors.get(each) for each in (alias, name)]
            present = self.values(name.rpartition(".")[0])[name]
            if any(not torch.equal(present if value is None else value.to(present), wanted[name]) for value in values):
                raise RefusedError(
                    f"{alias!r} and {name!r} are one tensor in the model, but were trained separately",
                    fix="load the adapter onto a model with untied weights",
                )
