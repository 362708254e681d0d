"""Parameter sharing (Lan et al. 2020): share weights across blocks and factorize token embeddings.

Paper       Lan et al. 2020, ALBERT (arXiv 1909.11942), sections 3.1 and 3.2.
Promise     With `part=all`, the blocks of a stack take the parameters, gradients, optimizer state and data-parallel
            traffic of only `groups` blocks. An embedding table (V, d) becomes two factors (V, E) and (E, d), with E =
            `embedding`.
Use         model = thrifty.apply(model, "share_parameters", groups=2)
            optimizer = thrifty.optim.AdamW(model, lr=1e-3)
Start with  `share_parameters:part=attention`, which loses the least quality. `part=all` saves the most memory.
Cost        Sharing costs no time: computation and activations equal the unshared model's. A factorized embedding adds
            two thin matmuls.
Avoid       Pretrained weights, because the first block of each group replaces the other blocks, and a factorized
            embedding is reinitialized.
Does not    Save time, or keep the quality of unshared blocks; ALBERT loses quality if all weights are shared, and
            little if only attention weights are shared (unverified).
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.core.claims import Claim
from thrifty.core.errors import IntegrityError, RefusedError, class_name
from thrifty.core.objective import Objective, Prediction, WrappedObjective
from thrifty.core.randomness import keyed_generator
from thrifty.core.run_notes import add_note
from thrifty.core.setting_bounds import Natural, Positive
from thrifty.core.stages import Stage
from thrifty.core.state import TrainState
from thrifty.core.technique import Numerics, Technique
from thrifty.modeling.embeddings import find_head, is_tied, token_tables
from thrifty.modeling.module_surgery import find_stacks, wrap_forward
from thrifty.modeling.residual_branches import find_branches

Part = Literal["all", "attention", "feed_forward"]


def first_of_group(block: int, depth: int, groups: int) -> int:
    """Return the index of the first block in the group of `block`.

    `depth` blocks form `groups` groups of nearly equal size.
    """
    group = block * groups // depth
    return -(-group * depth // groups)


def share(block: nn.Module, leader: nn.Module, chosen: Callable[[str], bool]) -> int:
    """Replace the chosen parameters of a block by the parameters of `leader`, the first block of its group.

    Return the number of elements by which the model shrinks.
    """
    replaced = set()
    leader_parameters = dict(leader.named_parameters(remove_duplicate=False))
    for path, parameter in list(block.named_parameters(remove_duplicate=False)):
        if chosen(path) and path in leader_parameters and leader_parameters[path].shape == parameter.shape:
            owner, _, last = path.rpartition(".")
            setattr(block.get_submodule(owner), last, leader_parameters[path])
            replaced.add(parameter)
    return sum(parameter.numel() for parameter in replaced)


def shared_blocks(model: nn.Module, groups: int) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yield each block that uses shared parameters: its name, the block, and the first block (leader) of its group."""
    for name, blocks in find_stacks(model).items():
        if groups > len(blocks):
            raise RefusedError(
                f"{len(blocks)} blocks do not form {groups} groups",
                fix=f"--set techniques.memory.share_parameters.groups={len(blocks)}",
            )
        for index, block in enumerate(blocks):
            first = first_of_group(index, len(blocks), groups)
            if first != index:
                yield f"{name}.{index}".removeprefix("."), block, blocks[first]


@torch.no_grad()
def factorize(model: nn.Module, width: int, seed: int) -> None:
    """Factorize each token table (V, d) into (V, E) and (E, d), with E = `width`.

    An output head tied to a table is factorized too. The product initially has the standard deviation of the table.
    """
    tables = token_tables(model)
    if not tables:
        raise RefusedError(
            f"{class_name(model)} has no token embedding", fix="--set techniques.memory.share_parameters.embedding=0"
        )
    named_head = find_head(model)
    users = {**tables, **({named_head[0]: named_head[1]} if named_head and is_tied(named_head[1], tables) else {})}
    factors: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for name, user in users.items():
        old = user.weight
        if width >= old.shape[1]:
            raise RefusedError(
                f"embedding={width} saves no parameters at width {old.shape[1]}",
                fix=f"--set techniques.memory.share_parameters.embedding={old.shape[1] // 2}",
            )
        if id(old) not in factors:
            thin, projection = old.new_empty(len(old), width), old.new_empty(width, old.shape[1])
            thin.normal_(generator=keyed_generator(f"{seed}/{name}.weight", old)).mul_(old.std())
            projection.normal_(generator=keyed_generator(f"{seed}/{name}.projection", old)).mul_(width**-0.5)
            factors[id(old)] = nn.Parameter(thin), nn.Parameter(projection)
        user.weight, user.projection = factors[id(old)]
        wrap_forward(user, _embed if isinstance(user, nn.Embedding) else _score)
    add_note(f"embeddings of width {width}: {', '.join(users)}")


def _embed(table: nn.Module, inner: Any, tokens: Tensor) -> Tensor:
    return inner(tokens) @ table.projection


def _score(head: nn.Module, inner: Any, hidden: Tensor) -> Tensor:
    return inner(F.linear(hidden, head.projection))


@torch.no_grad()
def multiply_out(model: nn.Module) -> None:
    """Replace each factorized table by the product of its factors. Tied heads stay tied."""
    tables: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if hasattr(module, "projection") and "forward" in vars(module):
            thin = module.weight
            if id(thin) not in tables:
                tables[id(thin)] = nn.Parameter(thin @ module.projection)
            module.weight = tables[id(thin)]
            del module.projection, module.forward


class FactorizedHead(WrappedObjective):
    """Wrapper of an objective that projects hidden states to the width E of a factorized head.

    The head is then an nn.Linear, so the loss can process the vocabulary in chunks.
    """

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        prediction = super().predict(model, batch)
        head = prediction.head
        if head is not None and prediction.hidden is not None and hasattr(head, "projection"):
            thin = nn.Linear(head.weight.shape[1], len(head.weight), bias=False, device="meta")
            thin.weight, thin.bias = head.weight, head.bias
            prediction.hidden, prediction.head = F.linear(prediction.hidden, head.projection), thin
        return prediction


class ShareParameters(Technique):
    """ALBERT base has 12M parameters, and BERT base has 108M (unverified). The gradient of a shared parameter is the
    sum over its uses. Norms for clipping and LAMB count a shared parameter once. Blocks keep their parameter names, but
    share the tensors of the first block of their group. Export writes separate tensors for each block, and multiplies
    factorized tables out. An output head tied to the embedding stays tied: it first projects hidden states to width E,
    and the loss is computed in chunks as usual."""

    stage, numerics = Stage.ARCHITECTURE, Numerics.DIFFERENT
    claims = frozenset({Claim.SHARED_PARAMETERS})
    clashes: ClassVar[Mapping[Claim, str]] = {
        Claim.FROZEN_BASE_WEIGHTS: "blocks start as copies of the first block, and frozen blocks could not adapt",
        Claim.DEPTH: "the groups of blocks would change with the depth",
        Claim.TRAINED_START: "the first block's weights would replace the weights of all other blocks",
        Claim.PARAMETER_SHARDING: "each block is sharded separately, which would untie shared parameters",
    }

    part: Part = "all"
    """Shared parameters of each block: all, or the linear layers of its attention or feed-forward networks."""
    groups: Positive = 1
    """Number of parameter sets in each stack; adjacent blocks form a group."""
    embedding: Natural = 0
    """Width E of the factorized token table; 0 turns factorization off."""
    seed: int = 0
    """Seed of a factorized table's initialization. The table's name also enters the seed."""

    @property
    def optional_seams(self) -> frozenset[str]:
        return frozenset() if self.embedding else frozenset({"objective"})

    def model(self, model: nn.Module) -> nn.Module:
        chosen = self._chosen(model)
        saved = 0
        for name, block, leader in shared_blocks(model, self.groups):
            saved += share(block, leader, lambda path, name=name: f"{name}.{path}" in chosen)
        add_note(f"{saved:,} parameters are shared with another block")
        if self.embedding:
            factorize(model, self.embedding, self.seed)
        return model

    def _chosen(self, model: nn.Module) -> set[str]:
        """Return the names of the shared parameters, with all aliases."""
        if self.part == "all":
            return {name for name, _ in model.named_parameters(remove_duplicate=False)}
        kinds = ("mlp",) if self.part == "feed_forward" else ("attention", "cross-attention")
        branches = (branch for blocks in find_branches(model).values() for block in blocks for branch in block)
        layers = [{**branch.inner, branch.name: branch.writer} for branch in branches if branch.kind in kinds]
        named = ((path, layer) for group in layers for path, layer in group.items())
        return {f"{path}.{name}" for path, layer in named for name, _ in layer.named_parameters()}

    def objective(self, objective: Objective) -> Objective:
        return FactorizedHead(objective) if self.embedding else objective

    def finish(self, model: nn.Module) -> nn.Module:
        for _, block, leader in shared_blocks(model, self.groups):
            shared = {id(parameter) for parameter in leader.parameters()}
            for module in block.modules():
                for name, parameter in module.named_parameters(recurse=False):
                    if id(parameter) in shared:
                        setattr(module, name, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
        multiply_out(model)
        return model

    def holds(self, state: TrainState) -> None:
        assert state.model is not None
        chosen = self._chosen(state.model)
        for name, block, leader in shared_blocks(state.model, self.groups):
            leader_parameters = dict(leader.named_parameters(remove_duplicate=False))
            for path, parameter in block.named_parameters(remove_duplicate=False):
                shared = leader_parameters.get(path) if f"{name}.{path}" in chosen else None
                if shared is not None and shared.shape == parameter.shape and parameter is not shared:
                    raise IntegrityError(f"{self.name}: {name}.{path} is no longer the shared parameter of its group")
