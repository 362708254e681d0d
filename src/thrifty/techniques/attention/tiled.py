"""Tiled attention: causal attention over tiles of queries, each against its own past only.

Paper     the tiling of Dao et al. 2022, FlashAttention (arXiv 2205.14135), without its online softmax: a tile sees its
          whole past at once, which on a CPU fits the cache.
Promise   on CPUs, two to four times the speed of torch's own attention in bfloat16 once compiled
          (benchmarks/bench_attention.py), keeping as little for the backward pass. On a machine busy with other
          work its many short steps wait more often and the gain may vanish.
Does not  change what is computed (numerics: rounding).
Avoid     without the technique `compile`, and on GPUs, where torch's own kernel is faster.
"""

from dataclasses import dataclass
from functools import partial

from torch import nn

from thrifty.core.bounds import Natural
from thrifty.core.errors import Refused
from thrifty.core.stages import Stage
from thrifty.core.surgery import note
from thrifty.core.technique import Numerics, Technique
from thrifty.kernels.attention import causal_attention_reference, tiled_causal_attention


@dataclass(frozen=True)
class Tiled(Technique):
    stage, numerics, tolerance = Stage.ATTENTION, Numerics.ROUNDING, 1e-4
    claims = frozenset({"attention core"})

    tile: Natural = 0
    """Queries per tile; 0 takes a quarter of the tokens, between 64 and 512."""

    def model(self, model: nn.Module) -> nn.Module:
        attentions = [module for module in model.modules() if hasattr(module, "core")]
        causal = [module for module in attentions if module.core is causal_attention_reference]
        if not causal:
            raise Refused(
                f"no plain causal attention with a replaceable core was found, of {len(attentions)} with a core",
                fix=f"--without {self.name}, or use a model whose attention keeps causal_attention_reference of "
                "thrifty.kernels.attention in an attribute `core`, such as the gpt and llama presets",
            )
        for module in causal:
            module.core = partial(tiled_causal_attention, tile=self.tile or None)
        others = len(attentions) - len(causal)
        note(f"{len(causal)} attention cores" + (f"; {others} stay: not plain and causal" if others else ""))
        return model
