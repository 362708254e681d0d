"""Execution plans of a transform chain. A chain has two parts: the head requires all parameters together; the tail does
not.

The tail is one of torch's fused kernels if a kernel computes the tail's elements. Otherwise it runs in chunks. Each
rule of a `ParameterPartition` has its own tail.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from thrifty.core.gradient_transform import (
    GradientTransform,
    Scalars,
    Slots,
    TransformChain,
    TransformScope,
    changes_updates,
)
from thrifty.optim.chunked_update import ChunkedUpdate, UpdateExecutor
from thrifty.optim.fused_updates import fuse_elements, fused_tail, without_factors
from thrifty.optim.parameter_partition import ParameterPartition
from thrifty.optim.transform_elements import AddDecayedWeights


@dataclass(frozen=True)
class TwoPartUpdate:
    """Two tails in sequence. The first tail overwrites the gradients with its result."""

    first: UpdateExecutor
    then: UpdateExecutor

    def apply(self, gradients: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> None:
        self.first.apply(gradients, slots, parameters, numbers)
        self.then.apply(gradients, slots, parameters, numbers)


@dataclass(frozen=True)
class PartitionedUpdate:
    """Tails that each update a part of the parameters. Parts are lists of parameter indices."""

    tails: list[tuple[list[int], UpdateExecutor]]

    def apply(self, gradients: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> None:
        for own, tail in self.tails:
            state = {slot: [tensors[i] for i in own] for slot, tensors in slots.items()}
            tail.apply([gradients[i] for i in own], state, [parameters[i] for i in own], numbers)


def split_chain(chain: TransformChain, parameters: Sequence[Tensor]) -> tuple[TransformChain, UpdateExecutor]:
    """Split an initialized chain into head and tail. The last element of the head requires all parameters together."""
    keys = [key for key, element in chain.elements.items() if changes_updates(element)]
    far = max((i + 1 for i, key in enumerate(keys) if chain.elements[key].reach is TransformScope.ALL), default=0)
    return chain.part(keys[:far]), update_tail(chain.part(keys[far:]), parameters)


def update_tail(chain: TransformChain, parameters: Sequence[Tensor]) -> UpdateExecutor:
    """Return the executor for a chain. No element may have scope `ALL`."""
    # a weight decay of 0 is left out, so that the addition to the parameters still applies the last scalar factors
    acting = [key for key, each in chain.elements.items() if not isinstance(each, AddDecayedWeights) or each.decay]
    chain = chain.part(acting)
    for key, element in chain.elements.items():
        if isinstance(element, ParameterPartition):
            chains = [(own, member_chain(chain, key, element, label)) for label, own in element.members.items()]
            return PartitionedUpdate(
                [(own, update_tail(member, [parameters[i] for i in own])) for own, member in chains]
            )
    # without elements, no kernel is needed: the update is only added, in any dtype
    if chain.elements and (tail := fused_tail(chain)):
        before, kernel = tail
        return (
            TwoPartUpdate(ChunkedUpdate(fuse_elements(before), None, parameters), kernel) if before.elements else kernel
        )
    inner, factors = without_factors(chain)
    return ChunkedUpdate(fuse_elements(inner), factors, parameters)


def member_chain(chain: TransformChain, key: str, partition: ParameterPartition, label: str) -> TransformChain:
    """Return the chain for the parameters of one rule of a partition, with the keys of the rule's slots."""
    (_, transform), own = partition.rules[label], partition.members[label]
    elements: dict[str, GradientTransform] = {}
    for place, element in chain.elements.items():
        elements |= _under(f"{key}.{label}", transform) if place == key else {place: element.subset(own)}
    member = TransformChain([])
    member.elements = {place: element for place, element in elements.items() if changes_updates(element)}
    return member


def _under(prefix: str, transform: GradientTransform) -> Mapping[str, GradientTransform]:
    if type(transform) is not TransformChain:
        return {prefix: transform}
    return {f"{prefix}.{key}": element for key, element in transform.elements.items()}
