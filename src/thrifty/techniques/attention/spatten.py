"""SpAtten (Wang et al. 2021): remove the least important tokens, heads and values block by block.

Paper       Wang et al. 2021, SpAtten: Efficient Sparse Attention Architecture with Cascade Token and Head Pruning
            (HPCA, arXiv 2012.09852), section 3.
Promise     After each block, the tokens and heads with the least importance so far are removed for all later blocks.
            Each query uses only the values with its largest weights.
Use         optimizer = thrifty.optim.AdamW(model, lr=1e-3)
            thrifty.apply((model, optimizer), "spatten", total_steps=1000)
Start with  `spatten:tokens=0.7,heads=0.9,values=0.8`. In a decoder, keep the default `recent_fraction=0.5`.
Cost        More time and memory than dense attention in software, because all pairs are computed. Each query's mask of
            kept tokens stays in memory until the next forward pass.
Avoid       Runs that should become faster, because the filter is slow in software. Use attention.block_sparse for
            speed.
Does not    Save time or memory without SpAtten's hardware, or skip the outputs of removed tokens, because models may
            predict at every token (not in the paper).
"""

from collections.abc import Mapping
from dataclasses import replace
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
from thrifty.modeling.attention_cores import ATTENTION_SITES, AttentionCore, AttentionSite, hides_later_keys
from thrifty.modeling.module_surgery import find_stacks, is_under
from thrifty.techniques.attention._replaced_attention import CHOSEN, ReplacedAttention, decided_phase

FORWARD_PASSES: ModuleNote[int] = ModuleNote("forward_passes")
"""Note on a first block, not an attribute of its relay: measurements that restore a model's modules restore it."""


class CascadeRelay:
    """The state that one block passes to the next in a forward pass.

    It has the importance of tokens and heads, and which of them are kept.
    """

    def __init__(self) -> None:
        self.current: CascadeState | None = None
        self.is_training = False
        self.first: nn.Module | None = None

    def begin(self, block: nn.Module, *called: Any) -> None:
        """Reset the state at the first block of a forward pass."""
        if not in_backward():
            self.first, self.current, self.is_training = block, None, torch.is_grad_enabled()
            FORWARD_PASSES.set(block, (FORWARD_PASSES.get(block) or 0) + self.is_training)

    def count_passes(self) -> int:
        """Return the number of forward passes with gradients since the last call."""
        assert self.first is not None
        passes = FORWARD_PASSES.get(self.first) or 0
        FORWARD_PASSES.set(self.first, 0)
        return passes


class CascadeCore:
    """An attention core that stores the `CascadeState` that it receives, because recomputation needs it again."""

    def __init__(self, relay: CascadeRelay, site: AttentionSite, keep: KeptShares, bits: int):
        self.relay, self.site, self.keep, self.bits = relay, site, keep, bits
        self.is_decoder = site.causal or site.hides_later_keys
        self.received: CascadeState | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        refuse_other_lengths(q.shape[2], k.shape[2])
        visible = visible_pairs(q.shape[2], k.shape[2], self.site.causal, mask, q.device)
        keep = self.shares(mask)
        if in_backward():
            self.refuse_several_passes()
            return cascade_attention(q, k, v, visible, self.received, keep, self.bits, **options)[0]
        before = self.relay.current
        if before is not None and before.alive.shape[:2] != (len(q), q.shape[2]):
            raise RefusedError(
                f"{Spatten.name}: {self.site.name} has {len(q)} sequences of {q.shape[2]} tokens, but the attention "
                f"before it has {before.alive.shape[0]} of {before.alive.shape[1]}",
                fix="choose attention.window, or a model without windows and without merged patches",
            )
        if self.relay.is_training:
            self.received = before
        output, self.relay.current = cascade_attention(q, k, v, visible, before, keep, self.bits, **options)
        return output

    def shares(self, mask: Tensor | None) -> KeptShares:
        """Return what the block keeps. In an encoder, no tokens are kept because they are the latest."""
        is_decoder = self.is_decoder or (mask is not None and hides_later_keys(mask))
        return self.keep if is_decoder else replace(self.keep, latest=0.0)

    def refuse_several_passes(self) -> None:
        if (passes := self.relay.count_passes()) > 1:
            raise RefusedError(
                f"{Spatten.name}: {self.site.name} cannot be recomputed after {passes} forward passes, because it "
                "stores the state of the last pass only",
                fix="--without memory.recompute; or run the backward pass after each forward pass",
            )


def in_backward() -> bool:
    """Return True if a backward pass is running, which may recompute forward code."""
    return torch._C._current_graph_task_id() != -1


CASCADE_HOOKS: ModuleNote[list[RemovableHandle]] = ModuleNote("cascade_hooks")


class Spatten(ReplacedAttention):
    """The importance of a token is the sum of its attention weights from all queries and heads. The importance of a
    head is the sum of the absolute values of its output. Later blocks remove more than earlier blocks. With `bits`,
    scores are computed in `bits` bits, and again with 4 more bits if the softmax is flat. Pruning has no gradient: the
    model learns through the kept scores, with straight-through rounding. Recomputed blocks reuse the decisions of the
    forward pass. With recomputed blocks, several forward passes before one backward pass are refused.

    Differs from the paper: a decoder trains on whole texts. So each query prunes by the tokens that it sees, and each
    token stays visible to itself. The latest tokens have been seen by few queries and would be removed first. So a
    decoder keeps some of the latest tokens (`recent_fraction`), as in H2O (Zhang et al. 2023, arXiv 2306.14048).
    Fractions refer to the tokens that a query sees. The paper fine-tunes trained models and predicts at a class token;
    here pruning starts at `from_step`.
    """

    clashes: ClassVar[Mapping[Claim, str]] = {
        Claim.HEADS_AND_NEURONS: "heads are compared across blocks, and it removes heads of each block",
        Claim.PIPELINE_PARALLELISM: "importance in earlier blocks is unknown on another rank",
        Claim.TENSOR_PARALLELISM: "importance sums over all heads, which would be on several ranks",
        Claim.RANK_WIDE_PLAN: "the first block differs from blocks that receive importance",
        Claim.COMPILED_BLOCKS: "blocks return importance in addition to their output",
        Claim.TOKENS_OF_BLOCKS: "tokens are compared across blocks, and it skips tokens in some blocks",
    }

    tokens: Fraction = 0.7
    """Fraction of kept tokens, averaged over pruning blocks. The first 15 % of the blocks, at least one, keep all
    tokens.
    """
    heads: Fraction = 0.9
    """Fraction of kept heads, averaged over pruning blocks. The first 30 % of blocks, at least one, keep all heads."""
    values: Fraction = 0.8
    """Fraction of a query's remaining tokens whose values the query uses."""
    recent_fraction: Probability = 0.5
    """In a decoder, fraction of kept tokens that are the query's latest tokens; 0 reserves only the query's own
    token."""
    spread: Probability = 0.2
    """Pruned fraction in the last block minus the pruned fraction in the first pruning block."""
    bits: Annotated[int, SettingBound(least=0, most=12)] = 0
    """Number of bits of queries and keys for the first scores, including the sign; 0 for exact scores."""
    from_step: StepOrFraction = 0.1

    def core(self, site: AttentionSite, calibration: Mapping[str, Any]) -> AttentionCore:
        return site.plain  # `model` replaces this core by a CascadeCore

    def model(self, model: nn.Module) -> nn.Module:
        model = super().model(model)
        CASCADE_HOOKS.set(model, [])
        if decided_phase(model)["phase"] == CHOSEN:
            connected = [
                site for name, blocks in find_stacks(model).items() for site in self.relay(model, name, blocks)
            ]
            for site in ATTENTION_SITES.of(model):
                if site.name not in connected:
                    raise RefusedError(
                        f"{self.name}: {site.name} is not in a list of blocks, so its previous block is unknown",
                        fix="keep the repeated blocks of the model in one nn.ModuleList",
                    )
        return model

    def relay(self, model: nn.Module, stack: str, blocks: nn.ModuleList) -> list[str]:
        """Give the attentions of a stack new cores that share one `CascadeRelay`. Return the names of the
        attentions."""
        relay, connected = CascadeRelay(), []
        for number, block in enumerate(blocks):
            for site in ATTENTION_SITES.of(model):
                if is_under(f"{site.name}.", f"{stack}.{number}".removeprefix(".")):
                    keep = self.kept_shares(number, len(blocks), self.recent_fraction)
                    site.put(CascadeCore(relay, site, keep, self.bits))
                    connected.append(site.name)
            if number == 0:
                CASCADE_HOOKS.of(model).append(block.register_forward_pre_hook(relay.begin))
        return connected

    def kept_shares(self, block: int, blocks: int, latest: float = 0.0) -> KeptShares:
        if block == 0:  # importance is unknown
            return KeptShares(1.0, 1.0, self.values)
        token_share, head_share = (
            1 - pruned_share(block, blocks, 1 - kept, self.spread if kept < 1 else 0.0, spared)
            for kept, spared in ((self.tokens, TOKENS_SPARED), (self.heads, HEADS_SPARED))
        )
        return KeptShares(token_share, head_share, self.values, latest)

    def finish(self, model: nn.Module) -> nn.Module:
        model = super().finish(model)
        for hook in CASCADE_HOOKS.remove(model):
            hook.remove()
        return model
