"""Layer-wise learning-rate decay (Clark et al. 2020): train blocks near the input more slowly.

Paper       Clark et al. 2020, ELECTRA (arXiv 2003.10555), appendix A. Also BEiT (Bao et al. 2021, arXiv 2106.08254) and
            MAE (He et al. 2021, arXiv 2111.06377), appendix A.2.
Promise     Block k of L, counted from 0, has the learning rate times `decay` ** (L - k). Embeddings have the learning
            rate times `decay` ** (L + 1), and the output head has the full learning rate.
Use         model, optimizer = thrifty.apply((model, optimizer), "layerwise_lr_decay", decay=0.75)
Start with  `layerwise_lr_decay:decay=0.75`, MAE's value for ViT-B. Use a learning rate several times higher than
            without decay.
Cost        The final update does not use torch's fused kernel, because that kernel takes one learning rate for all
            parameters.
Avoid       Training from scratch, because the first blocks would hardly change.
Does not    Save memory or time; its purpose is to protect pretrained features while a new head is untrained.
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

_AFTER = re.compile(r"(^|[._])(final|post|out|head|heads|lm_head|embed_out|logit|scale|classifier|pooler)([._]|$)")
_TABLE = re.compile(r"embed|position|wte|wpe")


def depth_factor(depth: int, blocks: int, decay: float) -> float:
    """Return the learning-rate factor at a depth: 0 is before the blocks, `blocks` + 1 is after the blocks."""
    return decay ** (blocks + 1 - depth)


def depths(model: nn.Module, embedding_pattern: str = "") -> dict[str, tuple[int, int]]:
    """Return the depth of each parameter (see `depth_factor`) and the number of blocks in its stack, by parameter name.

    `embedding_pattern` matches names of parameters that are used before the blocks. By default these parameters are
    detected by order and name. Raise RefusedError if the model has no list of equal blocks.
    """
    stacks = {stack: len(model.get_submodule(stack)) for stack in find_stacks(model)}
    positions: dict[int, tuple[str, int, int]] = {}
    started: set[str] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        stack = next((each for each in stacks if is_under(name, each)), None)
        if stack is not None:
            started.add(stack)
            depth = 1 + int(name.removeprefix(f"{stack}.").partition(".")[0])
        else:
            stack = stack_after(name, stacks)
            depth = 0 if _is_before(name, embedding_pattern, stack in started) else stacks[stack] + 1
        first, known, blocks = positions.get(id(parameter), (name, depth, stacks[stack]))
        positions[id(parameter)] = (first, min(known, depth), blocks)  # a tied parameter counts at its first use
    return {name: (depth, blocks) for name, depth, blocks in positions.values()}


def _is_before(name: str, embedding_pattern: str, is_defined_after: bool) -> bool:
    """Return True if a parameter outside the blocks is used before the blocks."""
    if embedding_pattern:
        return re.search(embedding_pattern, name) is not None
    if _AFTER.search(name):
        return False
    return not is_defined_after or _TABLE.search(name) is not None


class ScaleByParameterFactor(GradientTransform):
    """Multiply the update of each parameter by the factor of that parameter."""

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
        by_factor: dict[float, list[Tensor]] = {}
        for factor, update in zip(self.factors, updates, strict=True):
            by_factor.setdefault(factor, []).append(update)
        for factor, group in by_factor.items():
            if factor != 1.0:
                torch._foreach_mul_(group, factor)
        return updates


class LayerwiseLearningRateDecay(Technique):
    """The learning-rate factors follow BEiT and MAE. ELECTRA's published code multiplies by the decay once more: block
    k of L has the factor decay ** (L + 1 - k). Decoupled weight decay shrinks with the learning rate, as in torch's
    AdamW with one parameter group per depth.

    The method is made for a pretrained model (`model.folder`). In a model with several stacks, blocks are counted from
    the end of their own stack. Modules before the blocks are detected by order and name. `explain` lists these modules,
    and `embedding_pattern` overrides the detection. An embedding tied to the head counts as an embedding.
    """

    stage, numerics = Stage.SCHEDULE, Numerics.DIFFERENT
    clashes: ClassVar[Mapping[Claim, str]] = {Claim.SHARED_PARAMETERS: "parameters shared by all blocks have no depth"}

    decay: Fraction = 0.75
    """Ratio of a block's learning rate to the learning rate of the next block."""
    embedding_pattern: str = ""
    """Regular expression for names of parameters used before the blocks; by default they are detected by order and
    name."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pattern(self, self.name, "embedding_pattern")

    def model(self, model: nn.Module) -> nn.Module:
        named, parameter_depths = dict(model.named_parameters()), depths(model, self.embedding_pattern)
        for name, (depth, blocks) in parameter_depths.items():
            set_learning_rate_factor(named[name], depth_factor(depth, blocks, self.decay))
        for text in self._summary(parameter_depths):
            add_note(text)
        return model

    def _summary(self, parameter_depths: Mapping[str, tuple[int, int]]) -> Iterator[str]:
        ends = {"before the blocks": 0, "after the blocks": 1}
        for where, end in ends.items():
            depths_there = {name: at for name, at in parameter_depths.items() if at[0] == (at[1] + 1) * end}
            modules = sorted({name.rpartition(".")[0] or name for name in depths_there})
            rates = sorted({depth_factor(*at, self.decay) for at in depths_there.values()})
            if depths_there:
                yield f"{where}, at {' and '.join(f'{rate:.3g}' for rate in rates)} of the rate: {', '.join(modules)}"

    def update(self, transform: GradientTransform) -> GradientTransform:
        def factor_of(name: str, parameter: Tensor) -> float:
            factor = learning_rate_factor(parameter)
            if factor is None:
                raise IntegrityError(
                    f"{self.name}: {name!r} is not the parameter whose depth was recorded",
                    fix="leave out the technique that replaces parameters of the model",
                )
            return factor

        return chain(ScaleByParameterFactor(factor_of), transform)
