"""A masked autoencoder (He et al. 2021, arXiv 2111.06377) around the user's own Vision Transformer.

The model encodes the visible patches, and a small decoder of this package predicts the pixels of the others. Shapes are
those of `masked_autoencoder`.
"""

from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from thrifty.core.errors import RefusedError, class_name, reason_of
from thrifty.core.eval_mode import eval_mode
from thrifty.core.out_of_memory import is_out_of_memory
from thrifty.core.randomness import preserved_draws
from thrifty.kernels.image_patches import blank_patches
from thrifty.modeling.module_surgery import change_first, find_stacks, first_of, is_under
from thrifty.modeling.patch_grid import find_grid
from thrifty.modeling.stream_norms import is_norm
from thrifty.modeling.visible_patches import prepare, visible_only, without_patches
from thrifty.models.families.vit_mae import ViTMAE
from thrifty.models.init_laws import mae_uniform
from thrifty.models.masked_autoencoder import PatchDecoder
from thrifty.models.model_config import ModelConfig
from thrifty.models.transformer import initialize


@dataclass
class Capture:
    """The hidden states of the latest block in one call of an encoder, or the output of a norm that follows."""

    states: Tensor | None = None


# the hooks have no state of their own, so that copies of a block, as in growth, act as the block does
CURRENT: ContextVar[Capture | None] = ContextVar("capture", default=None)


class WrappedAutoencoder(nn.Module):
    """Masked autoencoder that maps images (b, c, h, w) to the decoder's hidden states (b, t, e), see
    `MaskedAutoencoder`. `encoder` is the user's model; its own head is computed without a gradient, so it only
    decays."""

    task: Literal["masked_reconstruction"] = "masked_reconstruction"
    law = staticmethod(mae_uniform)

    def __init__(self, encoder: nn.Module, decoder: PatchDecoder, head: nn.Linear, patch: int):
        super().__init__()
        self.encoder, self.decoder, self.head, self.patch = encoder, decoder, head, patch
        prepare(encoder)
        for block in self.blocks:
            block.register_forward_hook(_keep)
        for norm in _later_norms(encoder):
            norm.register_forward_hook(_keep_if_next)

    @property
    def blocks(self) -> nn.ModuleList:
        """The encoder's blocks."""
        return [*find_stacks(self.encoder).values()][-1]

    def forward(self, images: Tensor, visible: Tensor | None = None, blanks: bool = False) -> Tensor:
        grid = (images.shape[-2] // self.patch, images.shape[-1] // self.patch)
        if blanks and visible is not None:
            hidden = self.encode(blank_patches(images, visible, self.patch))
            hidden = without_patches(hidden, visible, hidden.shape[1] - grid[0] * grid[1])
        else:
            hidden = self.encode(images, visible)
        return self.decoder(hidden, visible, grid)

    def encode(self, images: Tensor, visible: Tensor | None = None) -> Tensor:
        """Return the encoder's final hidden states (b, m + n, d) of m tokens that are no patches and n patches."""
        token = CURRENT.set(capture := Capture())
        try:
            with nullcontext() if visible is None else visible_only(self.encoder, lambda patches: visible):
                self.encoder(images)
        finally:
            CURRENT.reset(token)
        assert capture.states is not None
        return capture.states

    def logits(self, images: Tensor, visible: Tensor | None = None) -> Tensor:
        return self.head(self(images, visible))


def _later_norms(encoder: nn.Module) -> list[nn.Module]:
    """Return the norms outside the blocks, one of which may normalize the output of the last block."""
    stacks = [*find_stacks(encoder)]
    named = encoder.named_modules()
    return [norm for name, norm in named if is_norm(norm) and not any(is_under(name, stack) for stack in stacks)]


@torch.compiler.disable
def _keep(block: nn.Module, inputs: Any, output: Any) -> None:
    if (capture := CURRENT.get()) is not None:
        capture.states = first_of(output)


@torch.compiler.disable
def _keep_if_next(norm: nn.Module, inputs: Any, output: Tensor) -> None:
    if (capture := CURRENT.get()) is not None and inputs and inputs[0] is capture.states:
        capture.states = output


def autoencoder_around(
    encoder: nn.Module, side: int, channels: int, seed: int = 0, decoder_depth: int = 2, decoder_width: int = 0
) -> WrappedAutoencoder:
    """Return a masked autoencoder around a Vision Transformer for square images of `side` pixels.

    The decoder has `decoder_depth` blocks of `decoder_width`, by default half of the encoder's width, and heads of 32.
    Its initial values follow from `seed`. Raises RefusedError if the patches of the model are not found.
    """
    encoder_width = find_grid(encoder).cut.out_channels
    width = decoder_width or max(32, encoder_width // 64 * 32)
    patch = patch_side(encoder, side, channels)
    heads = max(1, width // 32)
    shape = ModelConfig(
        "mae", 1, encoder_width, 1, 1, encoder_width, 0, 0, tied=False, norm_eps=1e-6,
        image=side, patch=patch, channels=channels, decoder_depth=decoder_depth, decoder_width=width,
        decoder_heads=heads, decoder_hidden=4 * width,
    )  # fmt: skip
    model = WrappedAutoencoder(encoder, ViTMAE().decoder(shape), nn.Linear(width, shape.vocabulary), patch)
    like = next(encoder.parameters())
    for part in (model.decoder, model.head):
        part.to(like.device, like.dtype)
    for part in ("decoder.", "head."):
        initialize(model, seed, within=part)
    return model


@torch.no_grad()
def patch_side(model: nn.Module, side: int, channels: int) -> int:
    """Return the height and width of a patch in pixels, measured with a blank image of `side` pixels. Raises
    RefusedError for a model whose last block has no state for each patch, such as a pyramid."""
    if isinstance(model, WrappedAutoencoder):
        return model.patch
    shapes: dict[nn.Module, torch.Size] = {}

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        change_first(output, lambda x: shapes.setdefault(module, x.shape))

    cut, last = find_grid(model).cut, [*find_stacks(model).values()][-1][-1]
    hooks = [module.register_forward_hook(note) for module in (cut, last)]
    like = next(model.parameters())
    image = torch.zeros(1, channels, side, side, device=like.device, dtype=like.dtype)
    try:
        with eval_mode(model), preserved_draws([image]):
            model(image)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        encoder = find_grid(model).encoder
        raise RefusedError(
            f"{class_name(model)} does not accept images of {channels} x {side} x {side}: {reason_of(error)}",
            fix="--set data.size=32, or the size of the model's images; images with as many channels as it takes"
            if encoder is model
            else f"pass its image encoder, the {type(encoder).__name__} inside, as the model",
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    patches = shapes[cut][-2:].numel()
    if len(shapes[last]) != 3 or shapes[last][1] < patches:
        raise RefusedError(
            f"the last block of {class_name(model)} has no hidden state for each of the {patches} patches",
            fix="use a Vision Transformer without stages, such as a ViT, a DeiT or --model mae-nano",
        )
    return side // shapes[cut][-1]
