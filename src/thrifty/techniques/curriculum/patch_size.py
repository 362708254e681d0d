"""Progressive patch size (Beyer et al. 2022): train on large patches first, then on smaller patches.

Paper       Beyer et al. 2022, FlexiViT (arXiv 2212.08013), resizes the patch weights. The survey of Zhuang et al. 2023
            (arXiv 2302.01107) describes training that starts with large patches.
Promise     Early steps are cheaper, because patches of twice the side leave a quarter of the tokens. The images keep
            their full size.
Use         run = thrifty.train(recipe="vit-digits", techniques=["curriculum.patch_size"], budget="2000 steps")
Start with  `patch_size:at=[0.5]`. Each additional step in `at` doubles the initial side of the patches.
Cost        The optimizer state is reset at each change. With `compile` the model is compiled once per number of
            patches.
Avoid       Tasks in which small details matter early. Use curriculum.resolution, which keeps the patches and shrinks
            the images.
Does not    Change the weights of the blocks, or support models other than this package's classifiers and two-tower
            models; their weights may come from Hugging Face folders.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from thrifty.core.claims import Claim
from thrifty.core.errors import IntegrityError, RefusedError, UsageError
from thrifty.core.module_notes import ModuleNote
from thrifty.core.objective import Objective
from thrifty.core.run_relative_settings import MovingMoment
from thrifty.core.stages import Stage
from thrifty.core.state import TrainState
from thrifty.core.structural_change import StructuralChange
from thrifty.core.technique import Numerics, Technique
from thrifty.kernels.image_resizing import resized_patches, resized_positions

FINAL_PATCH: ModuleNote[int] = ModuleNote("final_patch")
EMBEDDING_ATTRIBUTES = ("patch", "patch_size", "position", "before", "side")
"""Attributes of a patch embedding, the module that cuts images into patches."""


def find_embedding(model: nn.Module) -> tuple[str, Any]:
    """Return the name and module of the patch embedding.

    Raises RefusedError if the model has no patch embedding with learned positions, or has a decoder.
    """
    embeddings = [
        (name, each)
        for name, each in model.named_modules()
        if all(hasattr(each, part) for part in EMBEDDING_ATTRIBUTES)
    ]
    if len(embeddings) != 1 or not isinstance(embeddings[0][1].position, nn.Parameter) or hasattr(model, "decoder"):
        raise RefusedError(
            f"{type(model).__name__} is not a model of this package with image patches at learned positions",
            fix="use a Vision Transformer, such as --set model.preset=vit-nano",
        )
    return embeddings[0]


@torch.no_grad()
def resize_patches(embedding: Any, patch: int) -> None:
    """Change the patches of an embedding to a side of `patch` pixels. Its weights and positions are resized."""
    if embedding.side % patch:
        raise RefusedError(
            f"images of {embedding.side} x {embedding.side} pixels cannot be cut into patches of {patch} x {patch}",
            fix=f"fewer steps in curriculum.patch_size.at; or --set data.size={-(-embedding.side // patch) * patch}",
        )
    weight = embedding.patch.weight
    embedding.patch.weight = nn.Parameter(resized_patches(weight, patch), weight.requires_grad)
    embedding.patch.kernel_size = embedding.patch.stride = (patch, patch)
    grid = (embedding.side // patch,) * 2
    table = resized_positions(embedding.position, grid, embedding.before)
    embedding.position = nn.Parameter(table.clone(), embedding.position.requires_grad)
    embedding.patch_size = patch


def _refuse_uneven_images(embedding: Any, args: tuple[Any, ...]) -> None:
    """Raise UsageError if reduced images cannot be cut into whole patches. `resize_patches` checks only full images."""
    (height, width), patch = args[0].shape[-2:], embedding.patch_size
    if height % patch or width % patch:
        raise UsageError(
            f"images reduced to {height} x {width} pixels cannot be cut into the initial patches of {patch} x {patch}",
            fix=f"--set techniques.curriculum.resolution.multiple={patch}; or fewer steps in curriculum.patch_size.at",
        )


class PatchSizeCurriculum(Technique):
    """At each change of the patch size, new patch weights map a small patch to the token that the old weights compute
    for the enlarged patch. The learned positions are interpolated. Sides of images must be multiples of the largest
    patch. During training, evaluation uses the current patches. An early export has patches of the final size."""

    stage, numerics = Stage.GROW, Numerics.DIFFERENT
    claims = frozenset({Claim.PATCH_SIZE})
    clashes: ClassVar[Mapping[Claim, str]] = {Claim.PIPELINE_PARALLELISM: "only one stage of a pipeline has patches"}

    at: tuple[MovingMoment, ...] = (0.5,)
    """Steps that halve the side of a patch. With n steps, the initial side is 2^n times the final side."""

    def objective(self, objective: Objective) -> Objective:
        if not objective.sees_images:
            raise RefusedError(
                f"{self.name} requires images, because texts have no patches",
                fix=f"--without {self.name}; or --with curriculum.sequence_length",
            )
        return objective

    def changes(self, step: int, state: TrainState) -> StructuralChange | None:
        decided = state.logged_decision(self.name, step)
        if decided is None and step != 0 and step not in self.at:
            return None
        factor = decided["patch_factor"] if decided else 2 ** sum(1 for moment in self.at if moment > step)

        def restructure(model: nn.Module) -> nn.Module:
            _, embedding = find_embedding(model)
            FINAL_PATCH.set(model, embedding.patch_size)
            resize_patches(embedding, embedding.patch_size * factor)
            if factor > 1:
                embedding.register_forward_pre_hook(_refuse_uneven_images)
            return model

        def resize(parameter: str, value: Tensor, shape: torch.Size) -> Tensor:
            if value.ndim == 4:
                return resized_patches(value, shape[-1])
            assert state.model is not None
            before = find_embedding(state.model)[1].before
            return resized_positions(value, (round((shape[1] - before) ** 0.5),) * 2, before)

        reason = "large patches first" if step == 0 else "smaller patches"
        return StructuralChange(reason, {"patch_factor": factor}, restructure, resize=resize, moments="reset")

    def finish(self, model: nn.Module) -> nn.Module:
        """Return the plain architecture: the model with patches of the final size."""
        resize_patches(find_embedding(model)[1], FINAL_PATCH.of(model))
        return model

    def holds(self, state: TrainState) -> None:
        assert state.model is not None
        factors = [entry.decision["patch_factor"] for entry in state.log if entry.technique == self.name]
        _, embedding = find_embedding(state.model)
        if not factors or embedding.patch_size != FINAL_PATCH.of(state.model) * factors[-1]:
            raise IntegrityError(
                f"{self.name}: the side of patches is {embedding.patch_size}, but the run's log has "
                f"{factors[-1] if factors else 'no'} times the final side {FINAL_PATCH.of(state.model)}"
            )
