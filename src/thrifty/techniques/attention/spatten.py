"""SpAtten (Wang et al. 2021): remove the least important tokens, heads and values block by block.

Paper       Wang et al. 2021, SpAtten: Efficient Sparse Attention Architecture with Cascade Token and Head Pruning
            (HPCA, arXiv 2012.09852), section 3.
Promise     In each forward pass, importance is summed from block to block; the least important tokens and heads are
            removed for all later blocks. A query then takes only the values of its largest weights.
Use         optimizer = thrifty.optim.AdamW(model, lr=1e-3)
            thrifty.apply((model, optimizer), "spatten", total_steps=1000)
Start with  `spatten:tokens=0.7,heads=0.9,values=0.8`. In a decoder keep `recent_fraction=0.5`.
Cost        Time and memory in software: all pairs are computed. A mask of the kept tokens of each query stays until the
            next forward pass.
Avoid       Expecting speed from it. For speed use attention.block_sparse.
Does not    Save anything without the hardware. A removed token keeps its own row of attention, for models that predict
            at every token (ours).
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from thrifty.core.claims import Claim
from thrifty.core.errors import RefusedError
from thrifty.core.module_notes import ModuleNote
from thrifty.core.run_relative_settings import StepOrFraction
from thrifty.core.setting_bounds import Fraction, Probability, SettingBound
from thrifty.kernels.attention_filters.keep_masks import refuse_other_lengths, visible_pairs
from thrifty.kernels.attention_filters.spatten_filter import (
    HEADS_SPARED,
    TOKENS_SPARED,
    CascadeState,
    KeptShares,
    cascade_attention,
    pruned_share,
)
from thrifty.modeling.attention_sites import ATTENTION_SITES, AttentionCore, AttentionSite
from thrifty.modeling.module_surgery import find_stacks, is_under
from thrifty.techniques.attention._replaced_attention import CHOSEN, ReplacedAttention, decided_phase


class CascadeRelay:
    """What the blocks of one stack hand on in a forward pass."""

    def __init__(self) -> None:
        self.standing: CascadeState | None = None
        self.learns = False
        self.passes = 0
        """With a gradient, since blocks last ran again."""

    def begin(self, *called: Any) -> None:
        """A forward pass has come to the first block."""
        if not in_backward():
            self.standing, self.learns = None, torch.is_grad_enabled()
            self.passes += self.learns


class CascadeCore:
    """The core of one attention. It remembers what it was handed, for when its block runs again."""

    def __init__(self, relay: CascadeRelay, place: AttentionSite, keep: KeptShares, bits: int):
        self.relay, self.place, self.keep, self.bits = relay, place, keep, bits
        self.handed: CascadeState | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        refuse_other_lengths(q.shape[2], k.shape[2])
        visible = visible_pairs(q.shape[2], k.shape[2], self.place.causal, mask, q.device)
        if in_backward():
            self.refuse_several_passes()
            return cascade_attention(q, k, v, visible, self.handed, self.keep, self.bits)[0]
        before = self.relay.standing
        if self.relay.learns:
            self.handed = before
        output, self.relay.standing = cascade_attention(q, k, v, visible, before, self.keep, self.bits)
        return output

    def refuse_several_passes(self) -> None:
        passes, self.relay.passes = self.relay.passes, 0
        if passes > 1:
            raise RefusedError(
                f"{Spatten.name}: {self.place.name} is to run again for one of {passes} forward passes, and knows what "
                "it was handed in the last one alone",
                fix="train without the technique that recomputes blocks",
            )


def in_backward() -> bool:
    """Whether this is called from a backward pass: what runs there runs again."""
    return torch._C._current_graph_task_id() != -1


CASCADE_HOOKS: ModuleNote[list[RemovableHandle]] = ModuleNote("cascade_hooks")


class Spatten(ReplacedAttention):
    """The importance of a token is the attention that all queries and heads gave it; that of a head is the sum of the
    absolute values of its output. Later blocks remove more. With `bits`, scores are computed in that many bits, and
    in 4 more where softmax is flat. Pruning has no gradient: the model learns through what is left, with
    straight-through rounding to the exact scores. Recomputed blocks reuse the decisions of the forward pass; several
    forward passes before one backward pass are refused then.

    Differs from the paper: a decoder trains on whole texts, so each query prunes by what it sees and never by later
    tokens; each token stays visible to itself. The latest tokens have had few queries and would be removed first, so a
    decoder keeps some of them (`recent_fraction`; as in H2O, Zhang et al. 2023, arXiv 2306.14048). Shares refer to the
    tokens that a query sees. The paper fine-tunes trained models and predicts at a class token; here attention is plain
    up to `from_step`.
    """

    clashes: ClassVar[Mapping[Claim, str]] = {
        Claim.HEADS_AND_NEURONS: "heads are compared from block to block, and it takes some out of each",
        Claim.PIPELINE_PARALLELISM: "what mattered in earlier blocks is not known on another rank",
        Claim.TENSOR_PARALLELISM: "a token matters by what all heads give it, and they would be on several ranks",
        Claim.RANK_WIDE_PLAN: "the first block does something else than those that are handed what mattered",
        Claim.COMPILED_BLOCKS: "blocks hand on what mattered beside their result",
        Claim.TOKENS_OF_BLOCKS: "tokens are compared from block to block, and it leaves some out of a few blocks",
    }

    tokens: Fraction = 0.7
    """Tokens that are kept, on average over the blocks that prune; the first one, and 15 % of the blocks, do not."""
    heads: Fraction = 0.9
    """Heads that are kept, likewise; the first block, and 30 % of them, keep all."""
    values: Fraction = 0.8
    """Values that a query takes, of the tokens that are left for it."""
    recent_fraction: Probability = 0.5
    """In a decoder, of the tokens that are kept, those that are the latest before a query; 0 for its own alone."""
    spread: Probability = 0.2
    """How much larger the share that goes is in the last block than in the first that prunes."""
    bits: Annotated[int, SettingBound(least=0, most=12)] = 0
    """Of queries and keys with their sign, to begin with; 0 for exact scores."""
    from_step: StepOrFraction = 0.1

    def core(self, place: AttentionSite, calibration: Mapping[str, Any]) -> AttentionCore:
        return place.plain  # `model` puts one that knows its block there

    def model(self, model: nn.Module) -> nn.Module:
        model = super().model(model)
        CASCADE_HOOKS.set(model, [])
        if decided_phase(model)["phase"] == CHOSEN:
            placed = [place for name, blocks in find_stacks(model).items() for place in self.relay(model, name, blocks)]
            for place in ATTENTION_SITES.of(model):
                if place.name not in placed:
                    raise RefusedError(
                        f"{self.name}: {place.name} is in no list of blocks, so that none is known to come before it",
                        fix="keep the repeated blocks of the model in one nn.ModuleList",
                    )
        return model

    def relay(self, model: nn.Module, stack: str, blocks: nn.ModuleList) -> list[str]:
        """Connect the attentions of a stack of blocks; the names of their places."""
        relay, placed = CascadeRelay(), []
        for number, block in enumerate(blocks):
            for place in ATTENTION_SITES.of(model):
                if is_under(place.name, f"{stack}.{number}"):
                    latest = self.recent_fraction if place.causal else 0.0
                    place.put(CascadeCore(relay, place, self.kept_in(number, len(blocks), latest), self.bits))
                    placed.append(place.name)
            if number == 0:
                CASCADE_HOOKS.of(model).append(block.register_forward_pre_hook(relay.begin))
        return placed

    def kept_in(self, block: int, blocks: int, latest: float = 0.0) -> KeptShares:
        if block == 0:  # nothing is known yet, however few blocks there are
            return KeptShares(1.0, 1.0, self.values)
        of_tokens, of_heads = (
            1 - pruned_share(block, blocks, 1 - kept, self.spread if kept < 1 else 0.0, spared)
            for kept, spared in ((self.tokens, TOKENS_SPARED), (self.heads, HEADS_SPARED))
        )
        return KeptShares(of_tokens, of_heads, self.values, latest)

    def finish(self, model: nn.Module) -> nn.Module:
        model = super().finish(model)
        for hook in CASCADE_HOOKS.remove(model):
            hook.remove()
        return model
