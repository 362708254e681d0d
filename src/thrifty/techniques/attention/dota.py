"""DOTA (Qu et al. 2022): keep the same number of keys per query, chosen by a trained detector.

Paper       Qu et al. 2022, DOTA: Detect and Omit Weak Attentions for Scalable Transformer Acceleration (ASPLOS). Only
            the abstract was read; the projection and the equal number of keys are from memory (unverified). Precursor:
            Liu et al. 2021 (arXiv 2110.11299).
Promise     Every query keeps a fraction `density` of the keys. A detector estimates scores from a random projection of
            the block input, and is trained by λ times the mean squared error of the estimates.
Use         run = thrifty.train(recipe="vit-digits", techniques=["attention.dota"], budget="2000 steps")
Start with  `dota:density=0.25,ratio=0.25`. Set `products=rows` to save memory in compiled code.
Cost        Slower than dense attention in software, because scores are estimated, and computed exactly for the loss.
            `products=rows` computes and saves kept pairs only.
Avoid       Runs that should become faster, because the filter is slow in software. Use attention.block_sparse for
            speed.
Does not    Keep the detectors after training, or work in your own training loop, because it adds a loss.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import _disable_current_modes

from thrifty.core.claims import Claim
from thrifty.core.module_notes import ModuleNote
from thrifty.core.objective import Objective
from thrifty.core.randomness import keyed_generator
from thrifty.core.run_relative_settings import StepOrFraction
from thrifty.core.setting_bounds import Fraction, Rate, SettingBound
from thrifty.kernels.attention_filters.dota_filter import (
    balanced_keys,
    detected_scores,
    detector_loss,
    keep_of,
    sparse_projection,
)
from thrifty.kernels.attention_filters.keep_masks import attend_kept, exact_scores, visible_pairs
from thrifty.kernels.attention_filters.sanger_filter import quantized
from thrifty.kernels.sparse_attention.row_attention import row_attention
from thrifty.modeling.attention_cores import (
    ATTENTION_SITES,
    LOSING_CORES,
    AttentionCore,
    AttentionSite,
    call_core,
    hides_later_keys,
)
from thrifty.modeling.module_surgery import wrap_forward
from thrifty.techniques.attention._auxiliary_losses import AuxiliaryLossObjective
from thrifty.techniques.attention._replaced_attention import CHOSEN, ReplacedAttention, decided_phase

DETECTOR = ("detector_of_queries", "detector_of_keys")
DETECTOR_BUFFERS = ("detector_projection", "longest_text")


class DetectorCore:
    """An attention core with a detector, which reads the input (b, t, d) of the attention module in each call.

    The core appends the detector's loss (b,) to `losses` if `losses` is a list.
    """

    def __init__(self, settings: "Dota", site: AttentionSite, is_active: bool):
        self.settings, self.site, self.is_active = settings, site, is_active
        self.is_decoder = site.causal or site.hides_later_keys
        self.input: Tensor | None = None
        self.losses: list[Tensor] | None = None  # a list during collection

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        visible = visible_pairs(q.shape[2], k.shape[2], self.site.causal, mask, q.device)
        # a recomputed forward pass must save the same tensors, with or without collection
        is_training = torch.is_grad_enabled()
        estimated = self.estimate() if self.is_active or is_training else None
        if is_training and estimated is not None:
            loss = detector_loss(estimated, exact_scores(q, k), visible)
            if self.losses is not None:
                self.losses.append(loss)
        if not self.is_active or estimated is None:
            return call_core(self.site.plain, q, k, v, mask, **options)
        is_decoder = self.is_decoder or (mask is not None and hides_later_keys(mask))
        most, counts = self.kept_counts(visible, is_decoder)
        bias = options.get("bias")
        ranked = estimated.detach() if bias is None else estimated.detach() + bias.detach()
        keys = balanced_keys(ranked, most, visible, counts)
        if self.settings.products == "rows" and bias is None:
            return row_attention(q, k, v, keys, **options)
        return attend_kept(q, k, v, keep_of(keys, k.shape[2]), **options)

    def kept_counts(self, visible: Tensor, is_decoder: bool) -> tuple[int, Tensor | None]:
        """Return the maximum number of kept keys per query, and the number for each example (b,).

        In an encoder the number is a fraction of the example's own tokens. In a decoder it is a fraction of the longest
        training text, so that it is the same in a text of any length, and the second value is None.
        """
        density, tokens = self.settings.density, visible.shape[-1]
        if is_decoder:
            return max(round(density * self.longest(tokens)), 1), None
        counts = (visible.sum(-1).amax((1, 2)).double() * density).round().clamp(min=1)
        return max(round(density * tokens), 1), counts

    def longest(self, tokens: int) -> int:
        """Return the length of the longest text so far, including the current text. Training stores this length."""
        known = self.site.module.longest_text
        if is_fake(known) or known.is_meta:
            return tokens
        with _disable_current_modes():  # each trace of a block must contain the same operations
            most = max(int(known), tokens)
            if torch.is_grad_enabled():
                known.fill_(most)
        return most

    def estimate(self) -> Tensor:
        module, x = self.site.module, self.input
        assert x is not None
        w_q, w_k = (self.rounded(getattr(module, name).float()) for name in DETECTOR)
        projection = module.detector_projection.float()
        return detected_scores(self.rounded(x.float()), projection, w_q, w_k, self.rotation(x.shape[1], w_q.shape[-1]))

    def rotation(self, tokens: int, width: int) -> tuple[Tensor, Tensor] | None:
        """Return cosines and sines of the rotary positions for the detector, each (t, width / 2).

        Frequencies go from the highest to the lowest. Return None for a model without rotary positions.
        """
        tables = rotary_tables(self.site.module)
        if tables is None:
            return None
        cos, sin = tables
        pairs = torch.linspace(0, cos.shape[1] - 1, width // 2, device=cos.device).round().long()
        return cos[:tokens, pairs], sin[:tokens, pairs]

    def rounded(self, x: Tensor) -> Tensor:
        return quantized(x, self.settings.bits, x.detach().abs().amax((-1), keepdim=True).clamp(min=1e-12))


def rotary_tables(module: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Return cosines and sines of an attention's rotary positions, or None without rotary positions.

    Each is (positions, head width / 2).
    """
    position = getattr(module, "position", None)
    return (position.cos, position.sin) if hasattr(position, "cos") else None


DETECTOR_CORE: ModuleNote[DetectorCore] = ModuleNote("detector_core")
"""Attention core of a module, with its detector."""


def with_input(module: nn.Module, inner: Any, *args: Any, **kwargs: Any) -> Any:
    core = DETECTOR_CORE.of(module)
    x = next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
    tokens_first = isinstance(module, nn.MultiheadAttention) and not module.batch_first
    core.input = x.transpose(0, 1) if tokens_first else x
    try:
        return inner(*args, **kwargs)
    finally:
        core.input = None


class Dota(ReplacedAttention):
    """Each attention has a detector, which estimates scores to choose the kept keys. Its parameters are (h, r, r) for
    queries and for keys, with h heads and r = `ratio` · width. Random initial values produce estimates of magnitude
    one. The detector's operands are rounded to `bits` bits, with straight-through gradients. The detector loss also
    trains the model, whose scores become easier to estimate. Model and detectors train from the first step; keys are
    omitted at step `from_step` and later. A query keeps fewer keys only if it sees fewer keys.

    In a decoder the number of kept keys is the same in a shorter text, such as a prompt. The kept keys of a query do
    not change when the text grows up to the training length. In a model with rotary positions, the detector also
    rotates its operands at frequencies of the model, because the detector's input contains no position (not in the
    paper).

    The abstract reports 152.6 times the speed of a GPU. This ratio covers attention alone (from memory, unverified).
    The ViTCoD paper says that DOTA was scaled to about the peak throughput of the GPU.
    """

    claims = ReplacedAttention.claims | {Claim.AUXILIARY_LOSSES}
    clashes: ClassVar[Mapping[Claim, str]] = {
        Claim.WIDTH: "detectors have one width, and it makes matrices wider",
        Claim.HEADS_AND_NEURONS: "each head has a detector, and it removes heads",
        Claim.SHARED_PARAMETERS: "each block has a detector of its own",
        Claim.FROZEN_BASE_WEIGHTS: "its detectors would be frozen",
        Claim.PIPELINE_PARALLELISM: "the last stage does not know the loss of detectors in other stages",
        Claim.TENSOR_PARALLELISM: "a detector reads the input of all heads",
        Claim.COMPILED_BLOCKS: "detectors return their loss in addition to the block's output",
    }

    density: Fraction = 0.25
    """Kept keys per query, as a fraction of the text's length; in a decoder, of the longest training text's length."""
    ratio: Fraction = 0.25
    """Width of the detector as a fraction of the model's width."""
    bits: Annotated[int, SettingBound(least=2, most=16)] = 4
    """Number of bits of the detector's operands."""
    weight: Rate = 0.01
    """Weight λ of the detector loss."""
    products: Literal["dense", "rows"] = "dense"
    """Computation of attention: all pairs with a mask ("dense"), or kept pairs only ("rows")."""
    from_step: StepOrFraction = 0.1
    seed: int = 0
    """Seed of the projections and the detectors' initial values, combined with each module's name."""

    def model(self, model: nn.Module) -> nn.Module:
        losing = LOSING_CORES.set(model, [])
        model = super().model(model)
        is_active = decided_phase(model)["phase"] == CHOSEN
        for site in ATTENTION_SITES.of(model):
            self.attach(site)
            detector = DetectorCore(self, site, is_active)
            losing.append(detector)
            site.put(detector)
            DETECTOR_CORE.set(site.module, detector)
            wrap_forward(site.module, with_input)
        return model

    def attach(self, site: AttentionSite) -> None:
        """Add the projection and the detector to an attention."""
        width, heads, like = site.width, site.heads, next(site.module.parameters())
        reduced = max(round(self.ratio * width), 1)
        if rotary_tables(site.module) is not None:
            reduced += reduced % 2  # channels rotate in pairs
        generator = keyed_generator(f"{self.seed}/{site.name}.detector_projection", like)
        projection = sparse_projection(width, reduced, generator).to(like.device)
        site.module.register_buffer("detector_projection", projection, persistent=False)
        site.module.register_buffer("longest_text", torch.zeros((), dtype=torch.int64, device=like.device))
        for name in DETECTOR:
            weight = torch.empty(heads, reduced, reduced, device=like.device)
            weight.normal_(
                0, (width * reduced**0.5) ** -0.5, generator=keyed_generator(f"{self.seed}/{site.name}.{name}", weight)
            )
            site.module.register_parameter(name, nn.Parameter(weight))

    def core(self, site: AttentionSite, calibration: Mapping[str, Any]) -> AttentionCore:
        return site.plain  # `model` replaces this core by a DetectorCore

    def objective(self, objective: Objective) -> Objective:
        return AuxiliaryLossObjective(objective, self.weight)

    def finish(self, model: nn.Module) -> nn.Module:
        model = super().finish(model)
        for detector in LOSING_CORES.remove(model):
            for name in (*DETECTOR, *DETECTOR_BUFFERS):
                delattr(detector.site.module, name)
        return model
