"""Lottery ticket (Frankle and Carbin 2019): train under fixed weight masks read from a file.

Paper       Frankle and Carbin 2019, The Lottery Ticket Hypothesis (arXiv 1803.03635). Late rewinding: Frankle et al.
            2019 (arXiv 1903.01611).
Promise     Masked weights are zero at every step. Other weights start from the run's own initialization, which depends
            only on seed and model.
Use         from hashlib import sha256
            sha = sha256(open("mask.safetensors", "rb").read()).hexdigest()
            model, optimizer = thrifty.apply((model, optimizer), "mask_from_file", file="mask.safetensors", sha256=sha)
Start with  `mask_from_file`, with `file` and `sha256` as `thrifty lottery` prints them. Use `control=random-mask` for
            comparison.
Cost        The search for a mask takes one training run per round. At 20 % pruned per round, a density of 17 % takes
            nine runs.
Avoid       Masks for a single run, because the search pays off only if the mask is reused.
Does not    Save time by itself, because matmuls stay dense; sparsity.sparse_products can skip masked weights.
"""

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from safetensors import SafetensorError, deserialize
from safetensors.torch import save
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from thrifty.core.claims import Claim
from thrifty.core.errors import IntegrityError, RefusedError, UsageError, did_you_mean
from thrifty.core.randomness import keyed_generator
from thrifty.core.run_notes import add_note
from thrifty.core.state import TrainState, full_value
from thrifty.core.tensor_tracing import untraced
from thrifty.modeling.parameter_kinds import fused_slices
from thrifty.optim.mask_selection import Shapes, largest, masked_shapes, random_mask, shard_like_parameter
from thrifty.optim.weight_masks import check_masks, masks_in
from thrifty.techniques.sparsity._mask_techniques import MaskTechnique

KEY = "thrifty-ticket"
"""Metadata key of a ticket file. Its value is one JSON object, because the order of several entries would vary."""

Weights = Mapping[str, Tensor]
Scope = Literal["global", "layerwise"]


def prune_by_magnitude(
    weights: Weights, masks: Weights, prune: float, scope: str = "global", half: Collection[str] = ()
) -> Weights:
    """Return masks that drop the fraction `prune` of unmasked weights with the smallest magnitudes.

    The fraction refers to all matrices together ("global"), or to each matrix ("layerwise"). Each matrix named in
    `half` is pruned by half of the fraction. Among equal magnitudes the last elements are removed first.
    """
    separate = set(weights) if scope == "layerwise" else set(half)
    pruned = [_smallest_cut([name], weights, masks, prune / (1 + (name in half))) for name in sorted(separate)]
    rest = sorted(set(weights) - separate)
    pruned_masks = {name: mask for masks in pruned for name, mask in masks.items()}
    return {**pruned_masks, **(_smallest_cut(rest, weights, masks, prune) if rest else {})}


def _smallest_cut(names: Sequence[str], weights: Weights, masks: Weights, prune: float) -> Weights:
    sizes = [weights[name].abs().double().masked_fill(~masks[name], -1.0).flatten() for name in names]
    kept = sum(int(masks[name].sum()) for name in names)
    mask = largest(torch.cat(sizes), kept - round(prune * kept))
    parts = mask.split([len(size) for size in sizes])
    return {name: part.view_as(masks[name]) for name, part in zip(names, parts, strict=True)}


@torch.no_grad()
def shuffle_values(parameters: Mapping[str, Tensor], key: str) -> None:
    """Shuffle the values of every parameter. In a fused parameter, shuffle the values of each slice separately.

    Initial values keep their distribution.
    """
    cuts = fused_slices(list(parameters), list(parameters.values()))
    for (name, parameter), cut in zip(parameters.items(), cuts, strict=True):
        generator = keyed_generator(f"{key}/{name}")
        for part in (parameter,) if cut is None else cut.of(parameter):
            order = torch.randperm(part.numel(), generator=generator).to(part.device)
            part.copy_(part.flatten()[order].view_as(part))


def mask_file_bytes(masks: Weights, drawn: str, weights: Weights) -> bytes:
    """Return the bytes of a ticket file in safetensors format: boolean masks by parameter name, with metadata.

    The metadata are the origin `drawn`, the density and the sha256 of the weights. Equal inputs yield equal bytes.
    """
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].contiguous().flatten().view(torch.uint8).numpy().tobytes())
    facts = {"drawn": drawn, "density": density_of(masks), "weights": digest.hexdigest()}
    return save({name: mask.contiguous() for name, mask in masks.items()}, {KEY: json.dumps(facts)})


def counts_of(masks: Weights) -> dict[str, int]:
    """Return the number of weights that each mask keeps, by mask name."""
    return {name: int(mask.sum()) for name, mask in masks.items()}


def density_of(masks: Weights) -> float:
    """Return the fraction of weights that all masks together keep."""
    return sum(counts_of(masks).values()) / sum(mask.numel() for mask in masks.values())


def read_mask_file(file: str, sha256: str) -> dict[str, Tensor]:
    """Read the masks of a ticket file. Raise UsageError if there is no file, IntegrityError if its sha256 differs."""
    path = Path(file).expanduser()
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"there is no ticket '{path}': {error.strerror}", fix="draw one: thrifty lottery") from error
    actual = hashlib.sha256(content).hexdigest()
    if not sha256:
        raise UsageError(
            f"the ticket '{path}' requires its sha256", fix=f"--set techniques.sparsity.mask_from_file.sha256={actual}"
        )
    if actual != sha256:
        raise IntegrityError(
            f"'{path}' is not the recipe's ticket: its sha256 is {actual[:12]}…, not {sha256[:12]}…",
            fix="restore the old file; or start another run with the new sha256",
        )
    try:
        stored = dict(sorted(deserialize(content)))  # sorted, since the order differs between processes
    except SafetensorError as error:
        raise IntegrityError(f"'{path}' is not a safetensors file: {error}", fix="draw the ticket again") from error
    with untraced(), unset_fake_temporarily():  # real tensors even during fake-tensor tracing
        return {name: _mask(path, name, entry) for name, entry in stored.items()}


def _mask(path: Path, name: str, entry: Mapping[str, Any]) -> Tensor:
    if entry["dtype"] != "BOOL":
        raise UsageError(f"'{path}' has {entry['dtype']} for {name!r}, not BOOL", fix="draw one: thrifty lottery")
    shape = tuple(entry["shape"])
    values = torch.frombuffer(bytearray(entry["data"]), dtype=torch.bool) if math.prod(shape) else torch.empty(0)
    return values.bool().view(shape)


class MaskFileContents(NamedTuple):
    """Summary of a mask file: shape and number of unmasked weights of each mask."""

    shapes: Mapping[str, tuple[int, ...]]
    counts: Mapping[str, int]

    @property
    def density(self) -> float:
        return sum(self.counts.values()) / sum(math.prod(shape) for shape in self.shapes.values())


@lru_cache(maxsize=4)
def contents_of(file: str, sha256: str) -> MaskFileContents:
    masks = read_mask_file(file, sha256)
    with untraced(), unset_fake_temporarily():
        return MaskFileContents({name: tuple(mask.shape) for name, mask in masks.items()}, counts_of(masks))


class MaskFromFile(MaskTechnique):
    """`control` selects a control of the paper. "random-mask" keeps the same number of weights per matrix at random
    positions. "reinitialise" keeps the mask and shuffles the initial values of every parameter within its layer. The
    shuffled values are another sample of the same distribution. Without a file nothing is masked. The dense run of the
    first pruning round can therefore use this technique, and its state has the same entries as in later rounds."""

    clashes: ClassVar[Mapping[Claim, str]] = {
        **MaskTechnique.clashes,
        Claim.DEPTH: "a ticket belongs to the blocks of one model",
        Claim.WIDTH: "a ticket belongs to matrices of one size",
        Claim.SHARED_PARAMETERS: "a ticket has a mask for each block, and shared blocks have one matrix",
    }

    file: str = ""
    """Ticket file: safetensors of booleans by parameter name. If empty, nothing is masked."""
    sha256: str = ""
    """Hexadecimal sha256 of the file. A file that has changed is refused."""
    control: Literal["", "random-mask", "reinitialise"] = ""
    seed: int = 0
    """Seed of the control's random values. Each parameter's name also enters the seed."""

    @property
    def contents(self) -> MaskFileContents:
        return contents_of(self.file, self.sha256) if self.file else MaskFileContents({}, {})

    def idle_in(self, steps: int) -> str:
        return "" if self.file else "without a file no weight is masked"

    def model(self, model: nn.Module) -> nn.Module:
        parameters, ticket = dict(model.named_parameters()), self.contents
        for name, shape in ticket.shapes.items():
            if name not in parameters:
                raise RefusedError(
                    f"the ticket masks {name!r}, which the model does not have", fix=did_you_mean(name, parameters)
                )
            if not masked_shapes({name: parameters[name]}) or parameters[name].shape != shape:
                raise RefusedError(
                    f"the ticket's mask of {name!r} has shape {shape}, the weight {tuple(parameters[name].shape)}",
                    fix="use the model of the ticket, whose masks are for matrices other than position embeddings",
                )
        if self.control == "reinitialise":
            shuffle_values(parameters, f"{self.seed}")
        summary = f"{len(ticket.shapes)} matrices, density {ticket.density:.4g}" if ticket.shapes else "no ticket"
        add_note(f"{summary}; all other weights stay dense" + (f"; control: {self.control}" if self.control else ""))
        return model

    def masked(self, shapes: Shapes) -> list[str]:
        return [name for name in shapes if name in self.contents.shapes]

    def initial_masks(self, parameters: Weights) -> Weights:
        if not parameters:
            return {}
        if self.control != "random-mask":
            masks = read_mask_file(self.file, self.sha256)
            return {name: shard_like_parameter(masks[name], parameter) for name, parameter in parameters.items()}
        counts = self.contents.counts
        return {
            name: random_mask(each, counts[name] / each.numel(), f"{self.seed}/{name}")
            for name, each in parameters.items()
        }

    def holds(self, state: TrainState) -> None:
        assert state.model is not None
        counts, parameters = self.contents.counts, dict(state.model.named_parameters())
        own = {
            name: parameters[name] for name in counts if name in parameters
        }  # without the masks of other pipeline stages
        check_masks(self.name, state, {name: counts[name] for name in own})
        masks = masks_in(state)
        for name, mask in self.initial_masks(own).items():
            if name in masks and not torch.equal(full_value(masks[name]), full_value(mask)):
                raise IntegrityError(f"{self.name}: the mask of {name} is not the ticket's")
