"""Techniques in a loop of the user's own do what they do in the trainer, or are refused in words."""

import pytest
import torch
from tiny_runs import advance, plain_run, technique, with_optimizer

import thrifty
from thrifty import techniques
from thrifty.composition.compose import compose
from thrifty.core.claims import Claim
from thrifty.core.errors import NeedsTrainer, RefusedError, ThriftyError
from thrifty.core.technique import Technique
from thrifty.training.determinism import start_draws
from thrifty.training.loop import step_seed

STEPS = 8
NAMES = techniques.own_names()
LOSSY = {"memory.compress_activations": 0.02, "precision.mixed": 1e-3}
"""Relative difference of losses where values are drawn that depend on the trainer's own count of passes, or the head is
on the other side of a rounding."""


def trained_by_hand(chosen: Technique) -> list[float]:
    """Losses of a plain loop over the batches that the trainer takes."""
    plain = plain_run(depth=4, style="gpt")
    model = plain.build().train()
    optimizer = thrifty.optim.AdamW(model, **vars(technique("optimizers.adamw")))
    batch_size = {"batch": plain.source.batch} if chosen.name == "large_batch.scale_learning_rate" else {}
    model, optimizer = thrifty.apply((model, optimizer), chosen, total_steps=STEPS, **batch_size)
    losses = []
    for step in range(STEPS):
        start_draws(step_seed(0, step, 0), torch.device("cpu"))
        batch = plain.source.at(step)
        loss = (plain.objective.losses(plain.objective.predict(model, batch), batch) * batch.weight).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", NAMES)
def test_a_loop_by_hand_has_the_losses_of_the_trainer_or_the_technique_is_refused(name: str) -> None:
    chosen = technique(name)
    if Claim.OPTIMIZER in chosen.claims:
        with pytest.raises(ThriftyError, match=r"optimizer = thrifty\.optim\."):
            trained_by_hand(chosen)
        return
    try:
        losses = trained_by_hand(chosen)
    except NeedsTrainer as refused:
        assert name in str(refused) and "thrifty.train" in refused.fix
        return
    except RefusedError as refused:
        with pytest.raises(RefusedError):
            run = compose(plain_run(depth=4, style="gpt"), with_optimizer([chosen]), STEPS)
            run.build_model()
        assert refused.fix
        return
    run = compose(plain_run(depth=4, style="gpt"), with_optimizer([chosen]), STEPS)
    expected = [record.loss for record in advance(run, run.start())]
    assert losses == pytest.approx(expected, rel=LOSSY.get(name, 1e-5))
