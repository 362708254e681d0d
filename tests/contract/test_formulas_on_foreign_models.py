"""Formulas of sparse training on foreign models, against a few lines on the same tensors."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from drawn_models import EXAMPLES, ODDITIES, Rows, built, classified, own_loss, sizes_of
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset

import thrifty

WITHOUT_DROPOUT = dict.fromkeys(
    ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout_rate", "drop_path_rate", "hidden_dropout"), 0.0
)
Case = tuple[Callable[[], nn.Module], Dataset, Callable[..., Tensor]]


def of_transformers(name: str, family: str, kind: str) -> Case:
    model = getattr(transformers, name)
    sizes = sizes_of(random.Random(0), family, kind, 64) | WITHOUT_DROPOUT
    loss = classified if kind == "vision" else own_loss
    return partial(built, model, sizes), Rows(0 if kind == "vision" else 64), loss


MODELS: dict[str, Case] = {
    "hand-written, parallel branches": ODDITIES["parallel branches"],
    "hand-written, a stem of convolutions": ODDITIES["a stem of convolutions"],
    "NeoX": of_transformers("GPTNeoXForCausalLM", "GPTNeoX", "causal"),
    "DeiT": of_transformers("DeiTForImageClassification", "DeiT", "vision"),
    "Swin": of_transformers("SwinForImageClassification", "Swin", "vision"),
    "DeBERTa": of_transformers("DebertaV2ForMaskedLM", "DebertaV2", "masked"),
    "T5": of_transformers("T5ForConditionalGeneration", "T5", "seq2seq"),
}


def gradients(case: Case, model: nn.Module) -> tuple[dict[str, Tensor], Tensor]:
    """Return parameters and the loss on all examples in one batch."""
    _, data, loss = case
    rows = [data[index] for index in range(EXAMPLES)]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return dict(model.named_parameters()), loss(model, batch)


def masks_after(case: Case, one: Any, steps: int, runs: Path) -> tuple[dict[str, Tensor], nn.Module]:
    """Return the masks by parameter, and the model, after steps on all examples."""
    build, data, loss = case
    run = thrifty.train(
        build, data, held_out=data, loss=loss, techniques=[one, thrifty.AdamW(lr=1e-6)], budget=steps, batch=EXAMPLES,
        runs=runs, name="run", quiet=True,
    )  # fmt: skip
    newest = sorted((run.folder / "checkpoints").glob("step-*"))[-1]
    place = "optimizer/masks.mask/"
    stored = load_file(newest / "tensors.safetensors")
    masks = {name.removeprefix(place): mask for name, mask in stored.items() if name.startswith(place)}
    return {name: mask for name, mask in masks.items() if mask.numel()}, run.load_model()


def best(scores: dict[str, Tensor], density: float) -> dict[str, Tensor]:
    """Return masks of the highest scores over all layers."""
    together = torch.cat([score.flatten() for score in scores.values()])
    least = together.topk(round(density * len(together))).values[-1]
    return {name: score >= least for name, score in scores.items()}


def agreement(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    equal = sum(int((one[name].bool() == other[name]).sum()) for name in one)
    return equal / sum(mask.numel() for mask in one.values())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MODELS)
def test_snip_keeps_the_largest_gradient_products(name: str, tmp_path: Path) -> None:
    case = MODELS[name]
    masks, _ = masks_after(case, thrifty.Snip(density=0.3), 2, tmp_path)
    model = case[0]()
    parameters, loss = gradients(case, model.eval())
    grads = torch.autograd.grad(loss, [parameters[name] for name in masks])
    scores = {name: (parameters[name] * grad).abs() for name, grad in zip(masks, grads, strict=True)}
    assert len(masks) > 4 and agreement(masks, best(scores, 0.3)) > 0.9999


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MODELS)
def test_grasp_keeps_the_largest_hessian_products(name: str, tmp_path: Path) -> None:
    case = MODELS[name]
    masks, _ = masks_after(case, thrifty.Grasp(density=0.3, temperature=1.0), 2, tmp_path)
    model = case[0]()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        parameters, loss = gradients(case, model.eval())
        chosen = [parameters[name] for name in masks]
        grads = torch.autograd.grad(loss, chosen, create_graph=True)
        product = sum((grad * grad.detach()).sum() for grad in grads)
        hessian = torch.autograd.grad(product, chosen)
    scores = {name: parameters[name] * each for name, each in zip(masks, hessian, strict=True)}
    assert len(masks) > 4 and agreement(masks, best(scores, 0.3)) > 0.999


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MODELS)
def test_rigl_grows_where_the_gradient_is_largest(name: str, tmp_path: Path) -> None:
    case = MODELS[name]
    one = thrifty.Rigl(density=0.3, every=1, alpha=0.4, until=1.0)
    (before, model), (after, _) = (masks_after(case, one, steps, tmp_path / str(steps)) for steps in (1, 2))
    parameters, loss = gradients(case, model.eval())
    grads = dict(zip(before, torch.autograd.grad(loss, [parameters[name] for name in before]), strict=True))
    moved = 0
    for name, mask in before.items():
        old, new = mask.bool(), after[name].bool()
        grown = new & ~old
        assert int(old.sum()) == int(new.sum())
        if grown.any():
            gradient = grads[name].abs()
            least = gradient[~old].topk(int(grown.sum())).values[-1]
            assert float(gradient[grown].min()) > 0.999 * least - 1e-9
            moved += 1
    assert moved > 4
