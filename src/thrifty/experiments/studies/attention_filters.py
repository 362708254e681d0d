"""Attention filters: loss and density of each filter in a small language model and a small ViT.

Papers    Ham et al. 2021, ELSA (ISCA); Ham et al. 2020, A3 (HPCA); Lu et al. 2021, Sanger (MICRO); Qu et al. 2022, DOTA
          (ASPLOS); Wang et al. 2021, SpAtten (HPCA); You et al. 2023, ViTCoD (HPCA); Beltagy et al. 2020, Longformer
          (arXiv 2004.05150); Zaheer et al. 2020, BigBird (2007.14062).
Note      The papers filter trained models of 128 to 4096 tokens, some without further training. Here, models with
          inputs of 64 bytes or of 17 image patches are trained with their filter. The first tenth of training has no
          filter if the paper does so. Density is the fraction of visible pairs with a nonzero attention weight, over
          all blocks, heads and held-out examples. Seconds do not measure a filter, because in software every filter
          computes all pairs.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from thrifty.core.technique import Technique
from thrifty.data.text.token_windows import HeldOutWindows
from thrifty.experiments.study import Cells, MeasuredQuantity, Study, StudyPlot
from thrifty.experiments.tasks.image_task import train_on_images
from thrifty.experiments.tasks.language_task import decayed_adamw, source_text, train_llama
from thrifty.kernels.attention_filters.keep_masks import core_weights
from thrifty.modeling.attention_cores import ATTENTION_SITES
from thrifty.techniques.attention.a3 import A3
from thrifty.techniques.attention.block_sparse import BlockSparseAttention
from thrifty.techniques.attention.dota import Dota
from thrifty.techniques.attention.elsa import Elsa
from thrifty.techniques.attention.sanger import Sanger
from thrifty.techniques.attention.spatten import Spatten
from thrifty.techniques.attention.vitcod import Vitcod
from thrifty.techniques.attention.window import WindowAttention

FILTERS: Mapping[str, type[Technique]] = {
    "window": WindowAttention,
    "block-sparse": BlockSparseAttention,
    "ELSA": Elsa,
    "A3": A3,
    "Sanger": Sanger,
    "DOTA": Dota,
    "SpAtten": Spatten,
    "ViTCoD": Vitcod,
}
PLAIN = "plain"
SETTINGS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "window": {"wide": {"window": 16, "block": 16}, "narrow": {"window": 4, "block": 16}},
    "block-sparse": {
        "wide": {"block": 4, "window_blocks": 0, "global_blocks": 1, "random_blocks": 1},
        "narrow": {"block": 4, "window_blocks": 0, "global_blocks": 1, "random_blocks": 0},
    },
    "ELSA": {"wide": {"p": 1.0}, "narrow": {"p": 4.0}},
    "A3": {"wide": {"rounds": 0.5, "percent": 5.0}, "narrow": {"rounds": 0.125, "percent": 10.0}},
    "Sanger": {"wide": {"threshold": 0.02}, "narrow": {"threshold": 0.1}},
    "DOTA": {"wide": {"density": 0.25}, "narrow": {"density": 0.0625}},
    "SpAtten": {
        "wide": {"tokens": 0.7, "heads": 1.0, "values": 0.6},
        "narrow": {"tokens": 0.3, "heads": 0.75, "values": 0.3},
    },
    "ViTCoD": {"wide": {"cut": 0.7}, "narrow": {"cut": 0.3}},
}


@torch.no_grad()
def density_of(model: nn.Module, *inputs: Tensor) -> float:
    """Return the fraction of visible pairs with a nonzero weight in one forward pass; 1 if no attention was replaced by
    a filter.
    """
    kept, visible = 0, 0
    sites = ATTENTION_SITES.get(model) or ()
    cores = [site.module.core for site in sites]

    def counting(core: Any, causal: bool) -> Any:
        def counted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            nonlocal kept, visible
            weights = core_weights(core, q, k)
            kept += int((weights > 0).sum())
            pairs = weights[0, 0].numel() if not causal else weights.shape[2] * (weights.shape[2] + 1) // 2
            visible += pairs * weights.shape[0] * weights.shape[1]
            return core(q, k, v)

        return counted

    for site, core in zip(sites, cores, strict=True):
        site.module.core = counting(core, site.causal)
    try:
        model.eval()(*inputs)
    finally:
        for site, core in zip(sites, cores, strict=True):
            site.module.core = core
    return kept / visible if visible else 1.0


def measure(
    seed: int,
    model: str,
    method: str,
    settings: Mapping[str, Any],
    steps: int,
    depth: int,
    width: int,
    batch: int,
    length: int,
) -> dict[str, float]:
    """Return the held-out loss, the classification error on images, and the density at the end of the run."""
    chosen = [] if method == PLAIN else [FILTERS[method](**settings)]
    if model == "images":
        trained = train_on_images(
            chosen, steps=steps, seed=seed, data="digits", depth=depth, width=width, patch=2, batch=batch, lr=2e-3
        )
        metrics, net = trained.judged(497), trained.state.model
        assert net is not None
        pixels = next(iter(trained.images.held_out.batches(16, 16)))["inputs"]
        return {
            "loss": metrics["loss"],
            "wrong": 100 * (1 - metrics["accuracy"]),
            "density": 100 * density_of(net, pixels),
            "seconds": trained.seconds,
        }
    chosen += decayed_adamw(width)
    of_bytes = train_llama(chosen, steps=steps, seed=seed, depth=depth, width=width, length=length, batch=batch)
    tokens = next(iter(HeldOutWindows(source_text()[1], length).batches(16, 16)))["tokens"][:, :-1].long()
    return {
        "loss": of_bytes.held_out_loss(256),
        "wrong": float("inf"),
        "density": 100 * density_of(of_bytes.model, tokens),
        "seconds": of_bytes.seconds,
    }


def label_of(model: str, method: str, setting: str = "") -> str:
    return f"{model}, {method}" + (f", {setting}" if setting else "")


def attention_filters(
    seeds: int = 3, steps: int = 500, depth: int = 3, width: int = 64, batch: int = 16, length: int = 64
) -> Study:
    """Eight filters, each at a high and a low density, in a 3-block byte decoder and a 3-block ViT on digits.

    Command   thrifty study attention_filters
    Expect    On text, a window of 4 bytes loses almost nothing. Filters that compute scores lose less than block
              patterns without scores. On digits, ViTCoD's fixed masks improve the loss, and filters lose if a query
              keeps only one or two patches. Duration: about 40 minutes on one core, a third of it for A3.
    """
    fixed = {"steps": steps, "depth": depth, "width": width, "batch": batch, "length": length}
    cases: dict[str, Mapping[str, Any]] = {}
    for model in ("text", "images"):
        cases[label_of(model, PLAIN)] = {"model": model, "method": PLAIN, "settings": {}, **fixed}
        for method, variants in SETTINGS.items():
            for name, settings in variants.items():
                of_text = {"tokens": length} if method == "ViTCoD" and model == "text" else {}
                case = {"model": model, "method": method, "settings": {**settings, **of_text}, **fixed}
                cases[label_of(model, method, name)] = case

    def lost(cells: Cells, model: str, method: str, setting: str) -> float:
        """Return the held-out loss minus the loss with plain attention, in nats."""
        return cells[label_of(model, method, setting)]["loss"] - cells[label_of(model, PLAIN)]["loss"]

    def density(cells: Cells, model: str, method: str, setting: str) -> float:
        return cells[label_of(model, method, setting)]["density"]

    score_based = ("ELSA", "A3", "Sanger", "DOTA", "SpAtten")
    return Study(
        measure=measure,
        cases=cases,
        quantities={
            "loss": MeasuredQuantity("held-out loss at the end, nats (per byte, or per image)"),
            "wrong": MeasuredQuantity("held-out images classified wrongly, percent; infinite for text"),
            "density": MeasuredQuantity("visible pairs with a weight at the end, percent"),
            "seconds": MeasuredQuantity("seconds in training steps, one thread", of_machine=True),
        },
        seeds=seeds,
        expect={
            "for every filter in both models, the narrow setting keeps fewer pairs than the wide one": lambda c: all(
                density(c, model, method, "narrow") < density(c, model, method, "wide")
                for model in ("text", "images")
                for method in SETTINGS
            ),
            "in the language model, wide settings cost less than 0.1 nats": lambda c: all(
                lost(c, "text", method, "wide") < 0.1 for method in SETTINGS
            ),
            ("at a lower density, score-based filters lose less than narrow blocks, which ignore scores"): lambda c: (
                all(
                    lost(c, "text", method, "narrow") < lost(c, "text", "block-sparse", "narrow")
                    for method in score_based
                    if density(c, "text", method, "narrow") < density(c, "text", "block-sparse", "narrow")
                )
            ),
            "on text, a window of four bytes loses less than 0.1 nats": lambda c: (
                lost(c, "text", "window", "narrow") < 0.1
            ),
        },
        plots=[
            StudyPlot("loss", "Held-out loss by percent of pairs kept", x="density", y="loss", by="method", log_x=True),
            StudyPlot("wrong", "Error by percent of pairs kept", x="density", y="wrong", by="method"),
        ],
        minutes=30,
    )
