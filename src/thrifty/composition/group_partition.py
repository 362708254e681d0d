"""Updates of parameter groups with settings of their own: a chain of transforms per group."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from thrifty.core.gradient_transform import GradientTransform, TransformChain
from thrifty.optim.parameter_partition import ParameterPartition


class GroupPartition(ParameterPartition):
    """Partition by position, because two parameter groups may use the same name. `own_labels` has the label of each
    parameter."""

    def __init__(self, chains: Mapping[str, TransformChain], own_labels: Sequence[str]):
        super().__init__((label, every_parameter, each) for label, each in chains.items())
        self.own_labels = own_labels

    def labels(self, names: Sequence[str], parameters: Sequence[Tensor]) -> Sequence[str]:
        return self.own_labels


def elements_of(transform: GradientTransform) -> Iterator[GradientTransform]:
    """Yield the elements of a transform, also inside chains and partitions."""
    if isinstance(transform, TransformChain):
        for element in transform.elements.values():
            yield from elements_of(element)
    elif isinstance(transform, ParameterPartition):
        for _, member in transform.rules.values():
            yield from elements_of(member)
    else:
        yield transform


def adopt_settings(transform: GradientTransform, other: GradientTransform) -> None:
    """Copy the settings of a new transform to a used transform of the same structure. Data of parameters stays."""
    if isinstance(transform, TransformChain) and isinstance(other, TransformChain):
        for key, element in transform.elements.items():
            adopt_settings(element, other.elements[key])
    elif isinstance(transform, ParameterPartition) and isinstance(other, ParameterPartition):
        for label, (_, member) in transform.rules.items():
            adopt_settings(member, other.rules[label][1])
    else:
        # lists and dictionaries hold data of parameters; names with an underscore are caches
        settings = {name: value for name, value in vars(other).items() if not isinstance(value, list | dict)}
        vars(transform).update(settings | {name: value for name, value in vars(other).items() if name[0] == "_"})


def every_parameter(name: str, parameter: Tensor) -> bool:
    return True


def slot_names(transform: GradientTransform) -> set[str]:
    return set(transform.init(["weight"], [torch.zeros(2, 2)]))
