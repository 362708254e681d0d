"""Norms on the residual stream of any model, and a bypass that keeps parameter names."""

import re
from inspect import signature
from typing import Any

from torch import Tensor, nn

from thrifty.core.claims import Claim
from thrifty.core.errors import IntegrityError, RefusedError, class_name
from thrifty.core.run_notes import add_note
from thrifty.core.stages import Stage
from thrifty.core.state import TrainState
from thrifty.core.technique import Numerics, Technique
from thrifty.modeling.module_surgery import ModuleSelection, find_stacks, is_under, replace_forward

_OF_HEADS = re.compile(r"(q|k|qk|query|key|q_a|kv_a)_?(layer_?)?norm")
_OF_OUTPUT = re.compile(r"vocab|head|cls|predict|pool|classif")


def is_norm(module: nn.Module) -> bool:
    """Return True if a module has a norm's class name and no child modules. torch's modules that act on weights
    (`torch.nn.utils.parametrizations.weight_norm`) do not count."""
    acts_on_weights = type(module).__module__.startswith("torch.nn.utils")
    return "norm" in type(module).__name__.lower() and not any(module.children()) and not acts_on_weights


def stream_norms(model: nn.Module) -> ModuleSelection:
    """Return the norms on the residual stream: in blocks, after the embedding and after the last block. Norms of
    queries, keys and the output head, and norms with a gate, are listed as skipped, with reasons."""
    stacks, norms = list(find_stacks(model)), {n: module for n, module in model.named_modules() if is_norm(module)}
    skipped = {name: reason for name in norms if (reason := _why_it_stays(name, norms[name], stacks))}
    return ModuleSelection({name: norm for name, norm in norms.items() if name not in skipped}, skipped)


def _why_it_stays(name: str, norm: nn.Module, stacks: list[str]) -> str:
    if "gate" in signature(type(norm).forward).parameters:
        return "it also multiplies by a gate"
    # norms may be in separate lists next to the blocks, as in XLM
    parent, _, last = re.sub(r"(\.\d+)+$", "", name.lower()).rpartition(".")
    if any(is_under(name, stack) for stack in stacks):
        return "it normalizes queries or keys" if _OF_HEADS.fullmatch(last) else ""
    around = any(is_under(stack.lower(), parent) for stack in stacks)
    if "embed" in name.lower() or (around and not _OF_OUTPUT.search(last)):
        return ""
    return "it belongs to the head"


def pass_through(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return the input of a bypassed norm. All norms share this function, so that equal blocks compile to one graph."""
    return x


def bypass_norm(norm: nn.Module) -> None:
    """Replace a norm's forward by the identity. Its parameters remain and are frozen."""
    replace_forward(norm, pass_through)
    norm.requires_grad_(False)


def is_bypassed(module: nn.Module) -> bool:
    return vars(module).get("forward") is pass_through


def refuse_norms_with_parts(model: nn.Module) -> None:
    """Raise RefusedError for a norm with child modules, such as a quantizer of its output."""
    for name, module in model.named_modules():
        own = any(True for _ in module.parameters(recurse=False))
        if own and type(module).__name__.endswith("Norm") and any(module.children()):
            raise RefusedError(
                f"the norm {name} has child modules and cannot be bypassed",
                fix="use initializations.layer_scale, which keeps norms",
            )


def bypass_norms(model: nn.Module) -> ModuleSelection:
    """Bypass every norm of the residual stream, add a note about skipped norms, and return the selection. Raise
    RefusedError for a norm with child modules."""
    refuse_norms_with_parts(model)
    norms = stream_norms(model)
    for norm in norms.matched.values():
        bypass_norm(norm)
    skipped = {re.sub(r"\d+", "N", name): why for name, why in norms.skipped.items()}
    add_note(
        f"{len(norms.matched)} norms bypassed" + "".join(f"; {name} stays: {why}" for name, why in skipped.items())
    )
    return norms


def check_bypassed(model: nn.Module, technique: str) -> None:
    """Raise IntegrityError if a norm of the stream is not bypassed, or if its parameters are trained."""
    for name, norm in stream_norms(model).matched.items():
        if not is_bypassed(norm):
            raise IntegrityError(f"{technique}: the norm {name} is no longer bypassed")
        if any(p.requires_grad for key, p in norm.named_parameters() if key in ("weight", "bias")):
            raise IntegrityError(f"{technique}: {name} is bypassed, but its parameters are being trained")


class NormFreeTechnique(Technique):
    """A technique whose initialization makes norms unnecessary. The model cannot be converted back to the plain
    architecture."""

    stage, numerics = Stage.INITIALIZE, Numerics.DIFFERENT
    claims = frozenset({Claim.RESIDUAL_GAINS})

    def finish(self, model: nn.Module) -> nn.Module:
        raise RefusedError(
            f"{class_name(model)} was trained without its norms, "
            "and no weights of the plain architecture compute the same",
            fix="keep the run folder unchanged; or train with initializations.layer_scale, which can be merged",
        )

    def holds(self, state: TrainState) -> None:
        assert state.model is not None
        check_bypassed(state.model, self.name)
