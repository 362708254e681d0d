"""Visual prompt tuning (Jia et al. 2022): insert trained prompt tokens into a frozen ViT.

Paper       Jia et al. 2022, Visual Prompt Tuning (arXiv 2203.12119), section 3.2.
Promise     A frozen model learns prompts of width d, inserted after the class token: k before the first block, or with
            `deep=true` k before every block. The head is trained too unless `head=false`.
Use         vit = thrifty.apply(vit, "visual_prompt", tokens=10)
            optimizer = thrifty.optim.AdamW(vit, lr=1e-2)
Start with  `visual_prompt:tokens=10,deep=true`, the paper's better variant. Set `after=2` for a distilled ViT, which
            has a class and a distillation token.
Cost        Every block processes k more tokens. The backward pass runs through all frozen blocks.
Avoid       Text models, because their positions and masks would not cover the prompts. Use adapters.prompt_tuning for
            text.
Does not    Change the length of the output, because the prompts are removed after the last block.
"""

import math
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thrifty.core.errors import RefusedError, UsageError, class_name
from thrifty.core.randomness import keyed_generator
from thrifty.core.run_notes import add_note
from thrifty.core.setting_bounds import Natural, Positive
from thrifty.modeling.adapter_base import AdapterTechnique, head_names, names_ending, train_only
from thrifty.modeling.layer_shapes import in_width
from thrifty.modeling.module_surgery import change_first, find_stacks, wrap_forward
from thrifty.modeling.patch_grid import find_grid
from thrifty.modeling.residual_branches import find_branches

NAME = "visual_prompt"


def initial_bound(patch: int, width: int) -> float:
    """Return the bound of Xavier's uniform initialization for a layer that maps a patch to `width` values.

    A patch has 3 · patch² values.
    """
    return math.sqrt(6 / (3 * patch * patch + width))


def insert(x: Tensor, prompt: Tensor, after: int) -> Tensor:
    """Insert the prompt vectors (k, d) after the first `after` tokens of x. x is (b, t, d), the result (b, t +
    k, d)."""
    rows = prompt.to(x.dtype).expand(len(x), -1, -1)
    return torch.cat((x[:, :after], rows, x[:, after:]), 1)


def cut_out(x: Tensor, count: int, after: int) -> Tensor:
    """Remove the k = `count` tokens after the first `after` tokens of x. x is (b, t + k, d), the result (b, t, d)."""
    return torch.cat((x[:, :after], x[:, after + count :]), 1)


def add_prompts(blocks: nn.ModuleList, prompts: dict[int, Tensor], after: int) -> None:
    """Add prompts to blocks as the parameter `visual_prompt`. They are inserted after the first `after` tokens.

    `prompts` has the prompt (k, d) of a block by index. The first block must have one.
    """
    count, last = len(prompts[0]), len(blocks) - 1
    for index, block in enumerate(blocks):
        if index in prompts:
            block.visual_prompt = nn.Parameter(prompts[index])
        if index in prompts or index == last:
            wrap_forward(block, partial(_with_prompt, (count, after), index == 0, index == last))


def _with_prompt(
    span: tuple[int, int],
    is_first: bool,
    is_last: bool,
    block: nn.Module,
    inner: Any,
    x: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call a block with its prompt. `span` is the prompt's length and the number of tokens before the prompt."""
    if any(_has_token_dim(each, x) for each in (*args, *kwargs.values())):
        raise UsageError(
            f"{type(block).__name__} receives a mask or positions, which do not cover the inserted prompts",
            fix="--with adapters.prompt_tuning for text; or pass images without padding",
        )
    if hasattr(block, NAME):
        x = insert(x if is_first else cut_out(x, *span), block.visual_prompt, span[1])
    output = inner(x, *args, **kwargs)
    return change_first(output, lambda x: cut_out(x, *span)) if is_last else output


def _has_token_dim(value: Any, x: Tensor) -> bool:
    parts = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(part, Tensor) and x.shape[1] in part.shape[1:] for part in parts)


def patch_size(model: nn.Module) -> int:
    """Return the side of a patch in pixels. Raise RefusedError if no convolution cuts patches."""
    with suppress(RefusedError):
        return find_grid(model).patch
    raise RefusedError(
        "no convolution that cuts an image into patches was found",
        fix="--with adapters.prompt_tuning for text; or, for images, --set techniques.adapters.visual_prompt.patch=16, "
        "the side of a patch in pixels",
    )


class VisualPrompt(AdapterTechnique):
    """Works on any model with one stack of blocks that map (b, t, d) to (b, t, d), including a ViT of transformers.
    Initial values are uniform in ±sqrt(6 / (3 · p · p + d)) for patches of p × p pixels and width d. In the deep
    variant, each block replaces the prompt outputs of the previous block by its own prompts. The head is trained, as in
    the paper.

    Differs from the paper: dropout stays active as in the model; the paper keeps the backbone in evaluation mode.
    """

    tokens: Positive = 10
    """Number of prompt tokens in a block, k."""
    deep: bool = True
    """Insert new prompts in every block; otherwise only in the first block."""
    after: Natural = 1
    """Number of tokens before the prompts: 1 for a class token, 2 with a distillation token."""
    patch: Natural = 0
    """Side of a patch in pixels, for the initial values; 0 reads the side from the model."""
    head: bool = True
    """Train the output head too, unless the head shares its weight with the embedding."""
    seed: int = 0
    """Seed of the initial values, combined with each block's name."""

    def model(self, model: nn.Module) -> nn.Module:
        stacks = find_stacks(model)
        if len(stacks) > 1:
            raise RefusedError(
                f"prompts require one stack of blocks, but {class_name(model)} has {len(stacks)} stacks of blocks",
                fix="use a model with one stack, such as a ViT",
            )
        ((name, blocks),) = stacks.items()
        first = next(iter(find_branches(model, ends_only=True)[name][0][0].inner.values()))
        bound = initial_bound(self.patch or patch_size(model), in_width(first))
        prompts: dict[int, Tensor] = {}
        for index in range(len(blocks) if self.deep else 1):
            values = torch.empty(self.tokens, in_width(first), device=next(blocks.parameters()).device)
            generator = keyed_generator(f"{self.seed}/{name}.{index}.{NAME}", values)
            prompts[index] = values.uniform_(-bound, bound, generator=generator)
        add_prompts(blocks, prompts, self.after)
        add_note(f"{self.tokens} prompts in {len(prompts)} of {len(blocks)} blocks")
        train_only(model, names_ending(model, NAME) | (head_names(model) if self.head else set()))
        return model

    def finish(self, model: nn.Module) -> nn.Module:
        raise self.refuse_plain("prompts between the patches")
