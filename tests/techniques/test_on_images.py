"""Every technique on a Vision Transformer: it learns from images, or is refused with the reason."""

import pytest
import torch
from image_runs import image_run, tiny_vit
from image_work import AUGMENT, STEPS, own_rows, trained_along
from rank_processes import on_ranks
from tiny_runs import advance, assert_same, losses, restored, snapshot, technique, with_optimizer

from thrifty import techniques
from thrifty.composition.compose import compose
from thrifty.composition.explain import explain
from thrifty.core.errors import RefusedError
from thrifty.modeling.parameter_kinds import is_hidden_matrix, is_matrix
from thrifty.training.evaluation import evaluate

OF_TEXT = {
    "adapters.prompt_tuning": "adapters.visual_prompt",
    "data_selection.drop_masked_patches": "is not a masked autoencoder",
    "data_selection.drop_masked_tokens": "has no embedding of tokens",
    "growth.compound": "train on plain text",
    "large_batch.gradient_cache": "need no second forward pass",
    "curriculum.sequence_length": "train on plain text",
}
"""Techniques that are refused on images, with the message."""
OVER_RANKS = {"parallelism.shard"}
TOUCHY = ["adapters.lora", "growth.stacking", "sparsity.rigl", "memory.recompute", "precision.mixed"]
AXES = {
    "parallelism.replicate": {"replicate": 2},
    "parallelism.shard": {"shard": 2},
    "parallelism.tensor": {"tensor": 2},
    "parallelism.pipeline": {"pipeline": 2},
}


@pytest.mark.sampled(14)
@pytest.mark.parametrize("name", [name for name in techniques.names() if name not in OVER_RANKS])
def test_every_technique_learns_from_images_or_is_refused(name: str) -> None:
    chosen = with_optimizer([technique(name)])
    try:
        run = compose(image_run(batch=8, repeated=True), chosen, 4)
        state = run.start()
        records = advance(run, state)
    except RefusedError as refused:
        assert OF_TEXT[name] in str(refused)
        return
    assert name not in OF_TEXT
    run.verify(state)
    assert records[-1].loss < records[0].loss


@pytest.mark.parametrize("name", TOUCHY)
def test_resume_is_exact_on_images(name: str) -> None:
    def run():
        return compose(image_run(batch=4, augment=AUGMENT), with_optimizer([technique(name)]), 4)

    whole, stopped = run(), run()
    end, half = whole.start(), stopped.start()
    advance(whole, end)
    advance(stopped, half, 2)
    again = run()
    state = restored(again, snapshot(half))
    advance(again, state)
    assert_same(snapshot(state), snapshot(end))


def test_explain_counts_a_vit() -> None:
    run = compose(image_run(), with_optimizer([technique("adapters.lora")]), 4)
    explained = explain(run)
    assert explained.parameters == sum(p.numel() for p in tiny_vit().parameters())
    assert explained.footprint.gradients < explained.plain.gradients


def test_decay_and_muon_choose_matrices() -> None:
    parameters = dict(tiny_vit(1).named_parameters())
    of_block = {f"blocks.0.{name}.weight" for name in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")}
    decayed = {name for name, parameter in parameters.items() if is_matrix(name, parameter)}
    assert decayed == of_block | {"embedding.patch.weight", "head.weight"}
    assert {name for name, parameter in parameters.items() if is_hidden_matrix(name, parameter)} == of_block


def test_two_ranks_equal_one_process_on_every_axis() -> None:
    run = compose(image_run(batch=8, augment=AUGMENT), with_optimizer([]), STEPS)
    state = run.start()
    alone = losses(advance(run, state))
    batches = [run.plain.source.at(step) for step in (10, 11)]
    measured = evaluate(state.model, run.eval_objective, batches, torch.device("cpu"))
    for rank in on_ranks(2, trained_along, AXES):
        for name, (found, seen) in rank.items():
            assert found == pytest.approx(alone, rel=1e-4), name
            assert seen["loss"] == pytest.approx(measured["loss"], rel=1e-3), name
            assert seen["accuracy"] == measured["accuracy"], name


def test_ranks_have_disjoint_rows_that_cover_the_batch() -> None:
    found = on_ranks(2, own_rows, 1)
    whole = image_run(batch=8, augment=AUGMENT).source.at(1)["inputs"].flatten(1).tolist()
    assert [*found[0], *found[1]] == whole and len(found[0]) == 4
