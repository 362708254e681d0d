"""Contrastive loss of images and captions: values, metrics, several ranks, and techniques that refuse it."""

import math

import pytest
import torch
from contrastive_work import trained_along
from pair_runs import pair_run, tiny_clip
from rank_processes import on_ranks
from tiny_runs import losses, run_through, technique, with_optimizer

from thrifty.composition.compose import compose
from thrifty.core.batches import Batch
from thrifty.core.errors import RefusedError, UsageError
from thrifty.kernels.contrastive_loss import contrastive_losses_reference
from thrifty.objectives import find_objective
from thrifty.objectives.contrastive import Contrastive, PairPrediction
from thrifty.training.evaluation import evaluate

CPU = torch.device("cpu")


def test_losses_equal_similarities_and_weights_only_scale_them():
    batch, model = pair_run(batch=6).source.at(0), tiny_clip()
    objective = Contrastive()
    with torch.no_grad():
        prediction = objective.predict(model, batch)
        images, captions = prediction.hidden.unbind(1)
        torch.testing.assert_close(objective.losses(prediction, batch), contrastive_losses_reference(images, captions))
        torch.testing.assert_close(prediction.logits, images @ captions.T)
        lighter = batch.weighted(torch.tensor([1.0, 0, 0, 0, 0, 0]))
        assert torch.equal(objective.losses(prediction, lighter), objective.losses(prediction, batch))


def test_captions_without_padding_need_no_mask():
    batch, model = pair_run(batch=4).source.at(0), tiny_clip()
    whole = Batch({name: batch[name] for name in ("inputs", "tokens")}, batch.weight)
    with torch.no_grad():
        given = Batch({**whole.fields, "keep": torch.ones_like(batch["keep"])}, batch.weight)
        assert torch.equal(Contrastive().predict(model, whole).hidden, Contrastive().predict(model, given).hidden)


def test_accuracy_is_the_mean_over_both_directions():
    images = torch.eye(3)
    captions = torch.tensor([[1.0, 0, 0], [2.0, 1, 0], [0, 0, 1]])  # the second is nearest to the first image, too
    batch = Batch({}, torch.full((3,), 1 / 3))
    found = Contrastive().measures(PairPrediction(hidden=torch.stack((images, captions), 1)), batch)["accuracy"]
    assert found.tolist() == [0.5, 0.5, 1.0]


def test_uninformed_model_has_log_batch_loss_and_zero_accuracy():
    prediction = PairPrediction(hidden=torch.ones(8, 2, 4))
    batch = Batch({}, torch.full((8,), 1 / 8))
    torch.testing.assert_close(Contrastive().losses(prediction, batch), torch.full((8,), math.log(8)))
    assert Contrastive().measures(prediction, batch)["accuracy"].tolist() == [0.0] * 8


def test_held_out_pairs_are_matched_after_training():
    plain = pair_run(batch=16)
    held_out = [plain.source.at(40)]
    before = evaluate(plain.build(), plain.objective, held_out, CPU)
    _, state = run_through(plain, with_optimizer([]), 40)
    after = evaluate(state.model, plain.objective, held_out, CPU)
    assert after["accuracy"] > before["accuracy"] + 0.3
    assert after["loss"] < before["loss"] - 1


@pytest.mark.slow
def test_run_on_ranks_equals_one_process():
    """On two and on four ranks. Held-out batches are equal on all ranks, so each rank evaluates them alone."""
    wanted, held_out = trained_along([((), {})])[0]
    strategies = [(["parallelism.replicate"], {"replicate": 2}), (["parallelism.shard"], {"shard": 2})]
    cached = (["parallelism.shard", "large_batch.gradient_cache"], {"shard": 2})
    results = on_ranks(2, trained_along, [*strategies, cached])
    results += on_ranks(4, trained_along, [(["parallelism.replicate"], {"replicate": 4})])
    for rank in results:
        for loss, judged in rank:
            assert loss == pytest.approx(wanted, rel=1e-5)
            assert judged == pytest.approx(held_out, rel=1e-4)


def test_losses_of_one_rank_alone_would_differ():
    """Half of the batch has half of the negatives, so that the test above can fail."""
    plain = pair_run(batch=8)
    model, batch, objective = plain.build(), plain.source.at(0), plain.objective
    with torch.no_grad():
        whole = objective.losses(objective.predict(model, batch), batch)[:4]
        half = objective.losses(objective.predict(model, batch.rows(0, 4)), batch.rows(0, 4))
    assert (whole - half).min() > 0.1


APART = ("large_batch.gradient_accumulation", "measure.noise_scale", "data_selection.gradient_norm_sampling")


@pytest.mark.parametrize("name", [*APART, "losses.z_loss", "sparsity.grasp"])
def test_techniques_that_split_the_batch_refuse_it_at_plan_time(name):
    with pytest.raises(RefusedError, match=name) as refused:
        compose(pair_run(), with_optimizer([technique(name)]), 3)
    assert refused.value.fix


def test_data_without_captions_is_refused():
    labelled = Batch({"inputs": torch.zeros(2, 1, 8, 8), "labels": torch.zeros(2)}, torch.ones(2))
    with pytest.raises(UsageError, match="no tokens"):
        find_objective("contrastive").examples(labelled)


def test_temperature_is_trained():
    plain = pair_run(batch=8)
    _, state = run_through(plain, with_optimizer([]), 3)
    assert state.model.logit_scale.item() != plain.build().logit_scale.item()
    assert math.isfinite(losses(run_through(plain, with_optimizer([]), 1)[0])[0])
