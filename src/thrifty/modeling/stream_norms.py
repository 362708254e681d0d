"""Norms on the residual stream of any model, and taking them out of the computation while they keep their names."""

import re
from typing import Any

from torch import Tensor, nn

from thrifty.core.claims import Claim
from thrifty.core.errors import IntegrityError, RefusedError
from thrifty.core.run_notes import add_note
from thrifty.core.stages import Stage
from thrifty.core.state import TrainState
from thrifty.core.technique import Numerics, Technique
from thrifty.modeling.module_surgery import ModuleSelection, find_stacks, is_under, replace_forward

_OF_HEADS = re.compile(r"(q|k|qk|query|key|q_a|kv_a)_?(layer_?)?norm")
_OF_OUTPUT = re.compile(r"vocab|head|cls|predict|pool|classif")


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm: its class says so, it has no modules inside, and is none of torch's that act on
    weights (`torch.nn.utils.parametrizations.weight_norm`)."""
    of_weights = type(module).__module__.startswith("torch.nn.utils")
    return "norm" in type(module).__name__.lower() and not any(module.children()) and not of_weights


def stream_norms(model: nn.Module) -> ModuleSelection:
    """The norms that the residual stream or a branch of it passes: those in blocks, after the embedding and after the
    last block. Norms of queries and keys and norms in the head are named as skipped, with the reason."""
    stacks, norms = list(find_stacks(model)), {n: module for n, module in model.named_modules() if is_norm(module)}
    skipped = {name: reason for name in norms if (reason := _why_it_stays(name, stacks))}
    return ModuleSelection({name: norm for name, norm in norms.items() if name not in skipped}, skipped)


def _why_it_stays(name: str, stacks: list[str]) -> str:
    # norms may stand in lists of their own beside the blocks, as XLM's do
    parent, _, last = re.sub(r"(\.\d+)+$", "", name.lower()).rpartition(".")
    if any(is_under(name, stack) for stack in stacks):
        return "it normalises queries or keys" if _OF_HEADS.fullmatch(last) else ""
    around = any(is_under(stack.lower(), parent) for stack in stacks)
    if "embed" in name.lower() or (around and not _OF_OUTPUT.search(last)):
        return ""
    return "it belongs to the head"


def pass_through(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """What a bypassed norm computes. One function for all of them, so that equal blocks compile to one graph."""
    return x


def bypass_norm(norm: nn.Module) -> None:
    """A norm becomes the identity; its parameters stay where they are and are no longer trained."""
    replace_forward(norm, pass_through)
    norm.requires_grad_(False)


def is_bypassed(module: nn.Module) -> bool:
    return vars(module).get("forward") is pass_through


def bypass_norms(model: nn.Module) -> ModuleSelection:
    """Bypass every norm of the residual stream; the norms that were found, and a note of those that stay.

    Raises RefusedError for a norm with modules of its own, such as those that quantise its result for what comes next.
    """
    for name, module in model.named_modules():
        own = any(True for _ in module.parameters(recurse=False))
        if own and type(module).__name__.endswith("Norm") and any(module.children()):
            raise RefusedError(
                f"the norm {name} has modules inside and cannot be taken out of the computation",
                fix="use initializations.layer_scale, which keeps norms",
            )
    norms = stream_norms(model)
    for norm in norms.matched.values():
        bypass_norm(norm)
    kept = {re.sub(r"\d+", "N", name): why for name, why in norms.skipped.items()}
    add_note(f"{len(norms.matched)} norms bypassed" + "".join(f"; {name} stays: {why}" for name, why in kept.items()))
    return norms


def check_bypassed(model: nn.Module, technique: str) -> None:
    """Raises IntegrityError where a norm of the stream is not bypassed, or its own parameters are being trained."""
    for name, norm in stream_norms(model).matched.items():
        if not is_bypassed(norm):
            raise IntegrityError(f"{technique}: the norm {name} is back in the computation")
        if any(p.requires_grad for key, p in norm.named_parameters() if key in ("weight", "bias")):
            raise IntegrityError(f"{technique}: {name} is bypassed, but its parameters are being trained")


class NormFreeTechnique(Technique):
    """What first values that make norms needless share: norms stay bypassed, and no plain weights compute the same."""

    stage, numerics = Stage.INITIALIZE, Numerics.DIFFERENT
    claims = frozenset({Claim.RESIDUAL_GAINS})

    def finish(self, model: nn.Module) -> nn.Module:
        raise RefusedError(
            f"{type(model).__name__} was trained without its norms, "
            "and no weights of the plain architecture compute that",
            fix="keep the run folder as it is, or train with initializations.layer_scale, which can be folded away",
        )

    def holds(self, state: TrainState) -> None:
        assert state.model is not None
        check_bypassed(state.model, self.name)
