"""How a transform is run: what must see all parameters together first, then the rest, its tail, which need not.

A tail is a fused kernel where it is one, else it runs in pieces; each member of a partition has a tail of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from thrifty.core.gradient_transform import Chain, Numbers, Reach, Slots, Transform, moves
from thrifty.optim.chunked_update import InPieces, Tail
from thrifty.optim.fused_updates import by_kernels, fused_tail, without_factors
from thrifty.optim.parameter_partition import Partition


@dataclass(frozen=True)
class InOrder:
    """One tail that leaves its result in the gradients, then another."""

    first: Tail
    then: Tail

    def apply(self, gradients: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Numbers) -> None:
        self.first.apply(gradients, slots, parameters, numbers)
        self.then.apply(gradients, slots, parameters, numbers)


@dataclass(frozen=True)
class Members:
    """Tails for some of the parameters each, by index."""

    tails: list[tuple[list[int], Tail]]

    def apply(self, gradients: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Numbers) -> None:
        for own, tail in self.tails:
            state = {slot: [tensors[i] for i in own] for slot, tensors in slots.items()}
            tail.apply([gradients[i] for i in own], state, [parameters[i] for i in own], numbers)


def split(chain: Chain, parameters: Sequence[Tensor]) -> tuple[Chain, Tail]:
    """A chain, initialised with these parameters, as what must see all of them together, and its tail."""
    keys = [key for key, element in chain.elements.items() if moves(element)]
    far = max((i + 1 for i, key in enumerate(keys) if chain.elements[key].reach is Reach.ALL), default=0)
    return chain.part(keys[:far]), tail(chain.part(keys[far:]), parameters)


def tail(chain: Chain, parameters: Sequence[Tensor]) -> Tail:
    """How a chain without far-reaching elements is run."""
    for key, element in chain.elements.items():
        if isinstance(element, Partition):
            opened = [(own, opened_member(chain, key, element, label)) for label, own in element.members.items()]
            return Members([(own, tail(member, [parameters[i] for i in own])) for own, member in opened])
    # with nothing left to do the update is only added, whatever its number format
    if chain.elements and (found := fused_tail(chain)):
        before, kernel = found
        return InOrder(InPieces(by_kernels(before), None, parameters), kernel) if before.elements else kernel
    inner, factors = without_factors(chain)
    return InPieces(by_kernels(inner), factors, parameters)


def opened_member(chain: Chain, key: str, partition: Partition, label: str) -> Chain:
    """What the parameters of one member see of a chain with a partition in it, under the keys of its slots."""
    (_, transform), own = partition.rules[label], partition.members[label]
    elements: dict[str, Transform] = {}
    for place, element in chain.elements.items():
        elements |= _under(f"{key}.{label}", transform) if place == key else {place: element.only(own)}
    member = Chain([])
    member.elements = {place: element for place, element in elements.items() if moves(element)}
    return member


def _under(prefix: str, transform: Transform) -> Mapping[str, Transform]:
    if type(transform) is not Chain:
        return {prefix: transform}
    return {f"{prefix}.{key}": element for key, element in transform.elements.items()}
