"""Tiled attention (Dao et al. 2022): compute exact attention in tiles that fit a CPU cache.

Paper       Dao et al. 2022, FlashAttention (arXiv 2205.14135). Its tiling is used without the online softmax, because
            all visible keys of a tile of queries fit a CPU cache.
Promise     Compiled attention on CPUs takes less time than torch's own kernel, with the same result. Tiled attention
            saves as few activations as that kernel.
Use         run = thrifty.train("gpt-nano", "my.txt", techniques=["attention.tiled"], budget="2000 steps")
Start with  `tiled` together with `compile` on a CPU. On a GPU with Triton, `kernel=triton` runs the loops of
            FlashAttention.
Cost        Work is split into many short steps. If other processes use the cores, each step may wait, and the gain may
            vanish.
Avoid       Training without `compile`, because the gain requires compiled code. GPUs, because torch's own kernel is
            faster there.
Does not    Change the result beyond rounding.
"""

from functools import partial
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils._triton import has_triton_package

from thrifty.core.claims import Claim
from thrifty.core.errors import RefusedError
from thrifty.core.run_notes import add_note
from thrifty.core.setting_bounds import Natural
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.kernels.tiled_attention import tiled_attention
from thrifty.modeling.attention_cores import AttentionCore, refuse_changed_cores
from thrifty.modeling.attention_sites import find_attention_sites, find_own_sites


def triton_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    tile: int | None = None,
    dropout: float = 0.0,
    bias: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """Return attention, computed by Triton. With a mask, a bias, dropout or earlier keys, torch computes it in tiles.

    q and the result are (b, h, t, k), k and v are (b, g, s, k).
    """
    if mask is not None or bias is not None or dropout or q.shape[2] != k.shape[2]:
        return tiled_attention(q, k, v, mask, tile, dropout, bias, causal)
    from thrifty.kernels.flash_attention_triton import TILE, flash_attention

    return flash_attention(q, k, v, causal, tile=tile or TILE)


def attend_in_mask(
    kernel: AttentionCore, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any
) -> Tensor:
    """Return causal attention without a mask, and otherwise attention to all keys in the mask, which may be later.

    q and the result are (b, h, t, k), k and v are (b, g, s, k).
    """
    return kernel(q, k, v, mask, causal=mask is None, **options)


class TiledAttention(Technique):
    """`kernel=triton` runs FlashAttention's loops with online softmax (`kernels/flash_attention_triton.py`). Tests
    compare this kernel with torch's attention in Triton's interpreter and on an H100. The kernel was never timed.
    With masks, as of packed rows, with position biases and with dropout, the kernel is always the one in torch.
    """

    stage, numerics, tolerance = Stage.ATTENTION, Numerics.ROUNDING, 1e-4
    claims = frozenset({Claim.ATTENTION_CORE})

    tile: Natural = 0
    """Number of queries per tile. 0 selects a quarter of the tokens, between 64 and 512; in Triton, 64."""
    kernel: Literal["torch", "triton"] = "torch"
    """Implementation: torch's operations, or a Triton kernel on a GPU."""
    optional: bool = False
    """Replace only causal attention of Thrifty's models, and leave other models unchanged, with a note."""

    def model(self, model: nn.Module) -> nn.Module:
        sites = (
            [site for site in find_own_sites(model) if site.causal] if self.optional else find_attention_sites(model)
        )
        if not sites:
            add_note("unchanged: the model has no causal attention of Thrifty's")
            return model
        refuse_changed_cores(self.name, sites)
        if self.kernel == "triton":
            self.refuse_without_triton(model)
        kernel = tiled_attention if self.kernel == "torch" else triton_attention
        for site in sites:
            core = partial(kernel, tile=self.tile or None)
            has_causality = site.has_causal_masks or not site.causal
            site.put(partial(core, causal=site.causal) if has_causality else partial(attend_in_mask, core))
        add_note(f"{len(sites)} attention cores")
        return model

    def refuse_without_triton(self, model: nn.Module) -> None:
        device = next(model.parameters()).device
        if device.type != "cuda" or not has_triton_package():
            reason = f"the model is on '{device}'" if device.type != "cuda" else "Triton is not installed"
            raise RefusedError(
                f"the Triton kernel runs on GPUs, but {reason}", fix=f"--set techniques.{self.name}.kernel=torch"
            )
