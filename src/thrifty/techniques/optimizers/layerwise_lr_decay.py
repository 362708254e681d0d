"""Layer-wise learning-rate decay (Clark et al. 2020): train blocks near the input more slowly.

Paper       Clark et al. 2020, ELECTRA (arXiv 2003.10555), appendix A; BEiT (Bao et al. 2021, arXiv 2106.08254); MAE (He
            et al. 2021, arXiv 2111.06377), appendix A.2.
Promise     Of L blocks, block k trains at `decay` ** (L - k) of the rate, counted from 0. Embeddings train at `decay`
            ** (L + 1), the head at the full rate.
Use         model, optimizer = thrifty.apply((model, optimizer), "layerwise_lr_decay", decay=0.75)
Start with  `layerwise_lr_decay:decay=0.75`, MAE's value for ViT-B, with a rate several times higher than without it.
Cost        The optimizer's last kernel is not torch's fused one, which takes one rate for all parameters.
Avoid       Training from scratch: the first blocks would hardly move.
Does not    Save memory or time: it preserves pretrained features while a new head is still far from right.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import ClassVar

import torch
from torch import Tensor, nn

from thrifty.core.claims import Claim
from thrifty.core.errors import IntegrityError
from thrifty.core.gradient_transform import GradientTransform, Scalars, Slots, TransformScope, chain
from thrifty.core.run_notes import add_note
from thrifty.core.setting_bounds import Fraction, check_pattern
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.modeling.embeddings import stack_after
from thrifty.modeling.module_surgery import find_stacks, is_under
from thrifty.modeling.parameter_kinds import learning_rate_factor, set_learning_rate_factor

_BEHIND = re.compile(r"(^|[._])(final|post|out|head|heads|lm_head|embed_out|logit|scale|classifier|pooler)([._]|$)")
_TABLE = re.compile(r"embed|position|wte|wpe")


def depth_factor(depth: int, blocks: int, decay: float) -> float:
    """By what the rate at a depth is multiplied: 0 is before the blocks, 1 … `blocks` are the blocks, `blocks` + 1 is
    behind them."""
    return decay ** (blocks + 1 - depth)


def depths(model: nn.Module, embedding_pattern: str = "") -> dict[str, tuple[int, int]]:
    """The depth of each parameter, by name, as `depth_factor` counts it, and the number of blocks of its stack.

    `embedding_pattern` is a pattern of the names outside the blocks that come before them; empty goes by where in the
    model a parameter is defined and what it is called. Raises RefusedError where the model has no list of equal blocks.
    """
    stacks = {stack: len(model.get_submodule(stack)) for stack in find_stacks(model)}
    positions: dict[int, tuple[str, int, int]] = {}
    begun: set[str] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        stack = next((each for each in stacks if is_under(name, each)), None)
        if stack is not None:
            begun.add(stack)
            depth = 1 + int(name[len(stack) + 1 :].partition(".")[0])
        else:
            stack = stack_after(name, stacks)
            depth = 0 if _is_in_front(name, embedding_pattern, stack in begun) else stacks[stack] + 1
        first, known, blocks = positions.get(id(parameter), (name, depth, stacks[stack]))
        positions[id(parameter)] = (first, min(known, depth), blocks)  # of a tied one the place nearest to the input
    return {name: (depth, blocks) for name, depth, blocks in positions.values()}


def _is_in_front(name: str, embedding_pattern: str, is_behind: bool) -> bool:
    """Whether a parameter outside the blocks is used before them; `is_behind` says where it is defined."""
    if embedding_pattern:
        return re.search(embedding_pattern, name) is not None
    if _BEHIND.search(name):
        return False
    return not is_behind or _TABLE.search(name) is not None


class ScaleByParameterFactor(GradientTransform):
    """Multiplies the update of each parameter by a number of its own."""

    name = "scale_each"
    reach = TransformScope.ROWS

    def __init__(self, factor_of: Callable[[str, Tensor], float]):
        self.factor_of = factor_of
        self.factors: list[float] = []

    def init(self, names: Sequence[str], parameters: Sequence[Tensor]) -> Slots:
        self.factors = [self.factor_of(name, parameter) for name, parameter in zip(names, parameters, strict=True)]
        return {}

    def subset(self, indices: Sequence[int]) -> GradientTransform:
        some = copy(self)
        some.factors = [self.factors[i] for i in indices]
        return some

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor]:
        alike: dict[float, list[Tensor]] = {}
        for factor, update in zip(self.factors, updates, strict=True):
            alike.setdefault(factor, []).append(update)
        for factor, own in alike.items():
            if factor != 1.0:
                torch._foreach_mul_(own, factor)
        return updates


class LayerwiseLearningRateDecay(Technique):
    """The factors are those of BEiT and MAE. ELECTRA's published code counts one depth more between blocks and head:
    decay ** (L + 1 - k). Decoupled weight decay shrinks with the rate, as in torch's AdamW with one group per depth.

    It is made for a pretrained model (`model.folder`). In a model with several stacks, blocks are counted from the end
    of their own stack. Modules before the blocks are recognized by order and name; `embedding_pattern` corrects that,
    and `explain` lists them. A table tied to the head counts as an embedding.
    """

    stage, numerics = Stage.SCHEDULE, Numerics.DIFFERENT
    clashes: ClassVar[Mapping[Claim, str]] = {
        Claim.SHARED_PARAMETERS: "what blocks of all depths share has no depth of its own"
    }

    decay: Fraction = 0.75
    """From one block to the one below it."""
    embedding_pattern: str = ""
    """Pattern of the parameters outside the blocks that come before them; empty tells them by order and names."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pattern(self, self.name, "embedding_pattern")

    def model(self, model: nn.Module) -> nn.Module:
        named, parameter_depths = dict(model.named_parameters()), depths(model, self.embedding_pattern)
        for name, (depth, blocks) in parameter_depths.items():
            set_learning_rate_factor(named[name], depth_factor(depth, blocks, self.decay))
        for text in self._told(parameter_depths):
            add_note(text)
        return model

    def _told(self, parameter_depths: Mapping[str, tuple[int, int]]) -> Iterator[str]:
        ends = {"before the blocks": 0, "behind them": 1}
        for where, behind in ends.items():
            own = {name: at for name, at in parameter_depths.items() if at[0] == (at[1] + 1) * behind}
            modules = sorted({name.rpartition(".")[0] or name for name in own})
            rates = sorted({depth_factor(*at, self.decay) for at in own.values()})
            if own:
                yield f"{where}, at {' and '.join(f'{rate:.3g}' for rate in rates)} of the rate: {', '.join(modules)}"

    def update(self, transform: GradientTransform) -> GradientTransform:
        def factor_of(name: str, parameter: Tensor) -> float:
            factor = learning_rate_factor(parameter)
            if factor is None:
                raise IntegrityError(
                    f"{self.name}: {name} is not the parameter whose depth was found",
                    fix="leave out what puts other parameters in the place of a model's",
                )
            return factor

        return chain(ScaleByParameterFactor(factor_of), transform)
