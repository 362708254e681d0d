"""Encoders without masked patches: inputs, saved work, evaluation and ranks."""

import pytest
import torch
from autoencoder_work import STEPS, trained_along
from image_runs import autoencoder_run, tiny_mae, tiny_vit
from rank_processes import on_ranks
from tiny_runs import advance, losses, run_through, technique, with_optimizer
from torch import nn

from thrifty.composition.compose import Run, compose
from thrifty.composition.explain import count
from thrifty.core.errors import RefusedError, UsageError
from thrifty.distributed.model_partition import partition_model
from thrifty.objectives.masked_reconstruction import MaskedReconstruction
from thrifty.techniques.data_selection.drop_masked_patches import DropMaskedPatches, VisiblePatchObjective

AXES = {
    "parallelism.replicate": {"replicate": 2},
    "parallelism.shard": {"shard": 2},
    "parallelism.tensor": {"tensor": 2},
}


def composed(*chosen: str, **changed) -> Run:
    return compose(autoencoder_run(**changed), with_optimizer([technique(name) for name in chosen]), 4)


def tokens_through(run: Run, blocks: nn.ModuleList, model: nn.Module) -> set[int]:
    """Return the number of tokens of an image that a stack processes in a step."""
    seen = set()
    hooks = [block.register_forward_pre_hook(lambda _, args: seen.add(args[0].shape[1])) for block in blocks]
    run.objective.predict(model, run.source.at(0))
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize(("rate", "visible"), [(0.5, 8), (0.75, 4)])
def test_the_encoder_sees_visible_patches_the_decoder_all(rate: float, visible: int) -> None:
    model = tiny_mae()
    plain, without = composed(rate=rate), composed("data_selection.drop_masked_patches", rate=rate)
    assert tokens_through(plain, model.blocks, model) == {17}
    assert tokens_through(without, model.blocks, model) == {1 + visible}
    for run in (plain, without):
        assert tokens_through(run, model.decoder.blocks, model) == {17}


@pytest.mark.slow
def test_the_work_of_the_encoder_falls_with_its_tokens() -> None:
    flops = {}
    for depth in (4, 8):
        for name in ((), ("data_selection.drop_masked_patches",)):
            run = composed(*name, depth=depth)
            flops[depth, bool(name)] = count(run, run.techniques)[1].flops
    for without, tokens in ((False, 17), (True, 5)):
        matrices = 3 * tokens * 2 * (4 * 32 * 32 + 2 * 32 * 64)
        attention = (1 + 2.5) * 4 * tokens**2 * 32  # the backward pass recomputes the scores
        assert flops[8, without] - flops[4, without] == 4 * 4 * (matrices + attention)  # 4 examples, 4 blocks more


def test_visible_patches_keep_their_positions() -> None:
    """States of visible patches equal those of a model whose attention masks all other patches."""
    model, run = tiny_mae().eval(), composed()
    batch = run.source.at(0)
    whole = model.embedding(batch["inputs"])
    places = torch.cat((torch.zeros(4, 1, dtype=torch.int64), batch["visible"] + 1), 1)
    keep = torch.zeros(4, 17, dtype=torch.bool).scatter(1, places, True)
    with torch.no_grad():
        for block in model.blocks:
            whole = block(whole, keep[:, None, None, :])
        expected = model.norm(whole).gather(1, places[..., None].expand(-1, -1, 32))
        torch.testing.assert_close(model.encode(batch["inputs"], batch["visible"]), expected, rtol=1e-5, atol=1e-5)


def test_evaluation_uses_visible_patches_too() -> None:
    run = composed("data_selection.drop_masked_patches")
    assert isinstance(run.eval_objective, VisiblePatchObjective) and isinstance(
        composed().eval_objective, MaskedReconstruction
    )


def test_the_trained_model_is_the_plain_architecture() -> None:
    _, state = run_through(autoencoder_run(), with_optimizer([DropMaskedPatches()]), 2)
    assert state.model is not None
    finished = DropMaskedPatches().finish(state.model)
    plain = tiny_mae()
    plain.load_state_dict(finished.state_dict())
    images = autoencoder_run().source.at(5)["inputs"]
    assert torch.equal(plain(images), finished(images))


def test_other_models_are_refused_with_a_reason() -> None:
    with pytest.raises(RefusedError, match="VisionTransformer is not a masked autoencoder") as refused:
        DropMaskedPatches().model(tiny_vit())
    assert "objective.name=masked_reconstruction" in refused.value.fix
    with pytest.raises(UsageError, match="both decide the encoder input"):
        composed("data_selection.drop_masked_patches", "data_selection.drop_masked_tokens")


@pytest.mark.slow
def test_ranks_along_every_axis_equal_a_single_process() -> None:
    run = composed("data_selection.drop_masked_patches", batch=8)
    alone = losses(advance(run, run.start(), STEPS))
    for rank in on_ranks(2, trained_along, AXES):
        for name, actual in rank.items():
            assert actual == pytest.approx(alone, rel=1e-4), name


def test_a_pipeline_of_two_stacks_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"2 stacks of blocks, blocks and decoder\.blocks"):
        partition_model(tiny_mae(), timed=False)
