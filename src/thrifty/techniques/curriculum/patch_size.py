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
Does not    Change the weights of the blocks, or support models without one table of learned positions (Swin, ConvNeXt).
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from thrifty.core.claims import Claim
from thrifty.core.errors import IntegrityError, RefusedError, class_name, reason_of
from thrifty.core.eval_mode import eval_mode
from thrifty.core.module_notes import ModuleNote
from thrifty.core.objective import Objective
from thrifty.core.run_relative_settings import MovingMoment
from thrifty.core.stages import Stage
from thrifty.core.state import TrainState
from thrifty.core.structural_change import StructuralChange
from thrifty.core.technique import Numerics, Technique
from thrifty.kernels.image_resizing import resized_patches
from thrifty.modeling.patch_grid import PatchGrid, find_grid, resize_patches

FINAL_PATCH: ModuleNote[int] = ModuleNote("final_patch")


def find_patches(model: nn.Module) -> PatchGrid:
    """Return the patches of a model.

    Raises RefusedError if the model has no convolution that cuts patches at learned positions, or has a decoder.
    """
    grid = find_grid(model)
    is_learned = grid.tables and all(isinstance(table.value, nn.Parameter) for table in grid.tables)
    if grid.cut.kernel_size != grid.cut.stride or not is_learned or hasattr(model, "decoder"):
        raise RefusedError(
            f"{class_name(model)} is not a model with image patches at learned positions",
            fix="use a Vision Transformer, such as --set model.preset=vit-nano",
        )
    return grid


def _refuse_uneven_sides(height: int, width: int, patch: int) -> None:
    """Raise RefusedError if full images cannot be cut into whole patches of `patch` pixels."""
    if height % patch or width % patch:
        size = -(-max(height, width) // patch) * patch
        raise RefusedError(
            f"images of {height} x {width} pixels cannot be cut into patches of {patch} x {patch}",
            fix=f"fewer steps in curriculum.patch_size.at; or --set data.size={size}",
        )


def _refuse_fixed_grid(model: nn.Module, grid: PatchGrid, height: int, width: int) -> None:
    """Raise RefusedError if a blank image shows that other parts of the model depend on the number of patches."""
    blank = torch.zeros(1, grid.cut.in_channels, height, width, device=grid.cut.weight.device)
    try:
        with eval_mode(model), torch.no_grad():
            grid.encoder(blank)
    except TypeError:  # the model has other arguments, and the first step shows it
        pass
    except Exception as error:
        raise RefusedError(
            f"{class_name(model)} does not accept patches of {grid.patch} pixels: {reason_of(error)}",
            fix="--without curriculum.patch_size; or use a Vision Transformer whose positions are one table",
        ) from error


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
        if objective.learns_from and not objective.sees_images:
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
            grid = find_patches(model)
            FINAL_PATCH.set(model, grid.patch)
            height, width = (count * grid.patch for count in grid.tables[0].full)
            _refuse_uneven_sides(height, width, grid.patch * factor)
            resize_patches(grid, grid.patch * factor)
            _refuse_fixed_grid(model, grid, height, width)
            return model

        def resize(parameter: str, value: Tensor, shape: torch.Size) -> Tensor:
            if value.ndim == 4:
                return resized_patches(value, shape[-1])
            assert state.model is not None
            grid, patch = find_patches(state.model), FINAL_PATCH.of(state.model) * factor
            height, width = (count * grid.patch // patch for count in grid.tables[0].full)
            return grid.tables[0].resized(value, (height, width))

        reason = "large patches first" if step == 0 else "smaller patches"
        return StructuralChange(reason, {"patch_factor": factor}, restructure, resize=resize, moments="reset")

    def finish(self, model: nn.Module) -> nn.Module:
        """Return the plain architecture: the model with patches of the final size."""
        resize_patches(find_patches(model), FINAL_PATCH.of(model))
        return model

    def holds(self, state: TrainState) -> None:
        assert state.model is not None
        factors = [entry.decision["patch_factor"] for entry in state.log if entry.technique == self.name]
        patch = find_patches(state.model).patch
        if not factors or patch != FINAL_PATCH.of(state.model) * factors[-1]:
            raise IntegrityError(
                f"{self.name}: the side of patches is {patch}, but the run's log has "
                f"{factors[-1] if factors else 'no'} times the final side {FINAL_PATCH.of(state.model)}"
            )
