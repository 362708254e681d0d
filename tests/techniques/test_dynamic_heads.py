"""Dynamic heads: dropped and grown heads, whole heads at every step, and the smaller final model."""

import copy
from pathlib import Path

import pytest
import torch
import transformers
from image_runs import image_run
from rank_processes import on_ranks
from sparsity_work import masks_of_each, masks_under_each
from technique_runs import masked_run
from tiny_runs import VOCABULARY, advance, assert_same, plain_run, restored, snapshot, technique, with_optimizer
from torch import Tensor, nn

from thrifty.composition.compose import BaseRun, compose
from thrifty.core.errors import IntegrityError, RefusedError, UsageError
from thrifty.core.run_notes import collect_notes
from thrifty.modeling.structured_pruning import find_units
from thrifty.models import export_model
from thrifty.models.model_presets import ModelConfig
from thrifty.optim.weight_masks import masks_in
from thrifty.techniques.sparsity.dynamic_heads import DynamicHeads, moved_pieces

MOVING = DynamicHeads(every=1, alpha=1.0, until=5)
NAME = MOVING.name


def run_of(one: DynamicHeads = MOVING, *others: str, plain: BaseRun | None = None, steps: int = 6):
    chosen = with_optimizer([one, *map(technique, others)])
    return compose(plain or plain_run(style="gpt", depth=2), chosen, steps)


def heads_of(mask: Tensor, heads: int = 4) -> list[bool]:
    return mask.view(mask.shape[0], heads, -1).any(2).any(0).tolist()


def test_move_drops_smallest_score_and_grows_largest_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, gradient = torch.randn(2, 6, 12, generator=generator)
    kept = torch.tensor([True, True, True, False, False, False])
    weight.view(6, 6, 2)[:, 3:] = 0
    worth = [
        abs(sum((weight[:, 2 * h : 2 * h + 2] * gradient[:, 2 * h : 2 * h + 2]).flatten().tolist())) for h in range(3)
    ]
    norms = [float(gradient[:, 2 * h : 2 * h + 2].square().sum()) for h in range(6)]
    stay = {h for h in range(3)} - {worth.index(min(worth))}
    grown = max((h for h in range(6) if h not in stay), key=lambda h: norms[h])
    found = moved_pieces(kept, weight, gradient, 1 / 3)
    assert set(found.nonzero().flatten().tolist()) == stay | {grown}


def test_move_in_a_run_equals_plain_loop() -> None:
    plain = plain_run(style="gpt", depth=2)
    run = run_of(plain=plain)
    state = run.start()
    advance(run, state, 1)
    before = {name: mask.clone() for name, mask in masks_in(state).items()}
    model = plain.build()
    model.load_state_dict(state.model.state_dict())
    batch = plain.objective.examples(plain.source.at(1))
    (plain.objective.losses(plain.objective.predict(model, batch), batch) * batch.weight).sum().backward()
    advance(run, state, 2)
    for name, mask in masks_in(state).items():
        parameter = model.get_parameter(name)
        fraction = 0.5 * (1 + torch.tensor(torch.pi / 5).cos().item())
        wanted = moved_pieces(torch.tensor(heads_of(before[name])), parameter.detach(), parameter.grad, fraction)
        assert heads_of(mask) == wanted.tolist()
    assert any(not torch.equal(before[name], mask) for name, mask in masks_in(state).items())


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "sgd", "muon", "schedule_free"])
def test_number_of_whole_heads_is_constant(optimizer: str) -> None:
    others = () if optimizer == "schedule_free" else ("averaging.ema",)
    run = run_of(DynamicHeads(neurons=0.5, every=1, alpha=1.0, until=5), f"optimizers.{optimizer}", *others)
    state = run.start()
    first = {name: mask.clone() for name, mask in masks_in(state).items()}
    for step in range(1, 7):
        record = advance(run, state, step)[-1]
        run.verify(state)
        assert record.notes["density"] == 0.5
        judged = state.optimizer.eval_weights() or state.optimizer.parameters
        for slot, tensors in {**state.optimizer.slots, "judged": judged}.items():
            for name, tensor in zip(state.optimizer.names, tensors, strict=True):
                if (
                    (mask := masks_in(state).get(name)) is not None
                    and tensor.shape == mask.shape
                    and "mask" not in slot
                ):
                    assert not tensor[~mask].any(), f"{slot} of {name}"
    assert sum(not torch.equal(first[name], mask) for name, mask in masks_in(state).items()) >= 3


@pytest.mark.parametrize("saved", [1, 3])
def test_resume_is_exact(saved: int) -> None:
    whole, stopped, again = run_of(), run_of(), run_of()
    end, half = whole.start(), stopped.start()
    advance(whole, end)
    advance(stopped, half, saved)
    state = restored(again, snapshot(half))
    advance(again, state)
    assert_same(snapshot(state), snapshot(end))


def finished(model: nn.Module, one: DynamicHeads = MOVING) -> nn.Module:
    return one.finish(copy.deepcopy(model)).eval()


@pytest.mark.parametrize("style", ["gpt", "llama", "bert", "vit"])
def test_pruned_model_computes_the_same(style: str) -> None:
    plain = {"vit": image_run, "bert": masked_run}.get(style, lambda: plain_run(style=style, depth=2))()
    run = run_of(DynamicHeads(neurons=0.5, every=1, alpha=1.0, until=5), plain=plain)
    state = run.start()
    advance(run, state)
    model = state.model.eval().double()  # float64: the order of summation does not matter
    smaller = finished(model, DynamicHeads(neurons=0.5))
    given = image_run().source.at(9)["inputs"].double() if style == "vit" else torch.arange(12).view(1, 12)
    with torch.no_grad():
        assert float((smaller(given) - model(given)).abs().max()) < 1e-12
    counts = {(pieces.kind, pieces.count) for pieces in find_units(smaller).values()}
    assert counts == {("heads", 1 if style == "llama" else 2), ("neurons", 32)}
    parameters = [sum(p.numel() for p in each.parameters()) for each in (smaller, model)]
    assert parameters[0] < 0.8 * parameters[1]


def test_export_loads_in_transformers(tmp_path: Path) -> None:
    one = DynamicHeads(neurons=0.5, every=1, alpha=1.0, until=5)
    run = run_of(one, plain=plain_run(style="llama", depth=2))
    state = run.start()
    advance(run, state)
    export_model(finished(state.model, one), ModelConfig("llama", 2, 32, 4, 2, 64, VOCABULARY, 24, True), tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert (loaded.config.num_attention_heads, loaded.config.intermediate_size) == (2, 32)
    tokens = torch.arange(12).view(1, 12)
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, state.model.eval().logits(tokens), rtol=1e-5, atol=1e-5)


def test_two_ranks_move_the_same_heads() -> None:
    alone = masks_of_each("", [NAME])
    strategies = ("parallelism.replicate", "parallelism.shard")
    assert alone[NAME]
    assert on_ranks(2, masks_under_each, strategies, [NAME]) == [dict.fromkeys(strategies, alone)] * 2


@pytest.mark.parametrize("other", ["memory.offload_optimizer", "precision.bfloat16_weights"])
def test_heads_are_masked_with_offloaded_optimizer(other: str) -> None:
    run = run_of(MOVING, other)
    state = run.start()
    advance(run, state)
    run.verify(state)
    assert all(sum(heads_of(mask)) == 2 for mask in masks_in(state).values()) and len(masks_in(state)) == 2


def test_partial_head_raises_integrity_error() -> None:
    run = run_of()
    state = run.start()
    name, mask = next(iter(masks_in(state).items()))
    mask[:, int(mask[0].nonzero()[0])] = False
    with pytest.raises(IntegrityError, match=f"{NAME}: {name} keeps 2 heads, not all whole"):
        run.verify(state)


def test_note_says_that_heads_never_move() -> None:
    with collect_notes() as notes:
        DynamicHeads(every=1, alpha=0.1, until=5).model(plain_run(style="gpt").build())
    assert "2 of 4 heads a block, which never move" in notes


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ("sparsity.rigl", "weight masks"),
        ("sparsity.early_bird", "sparsity.early_bird"),
        ("adapters.lora", "frozen"),
        ("growth.compound", "growth.compound"),
    ],
)
def test_conflicting_techniques_are_refused(other: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        run_of(MOVING, other)


def test_heads_of_an_encoder_decoder_are_zeros() -> None:
    with collect_notes() as notes:
        MOVING.model(plain_run(style="t5").build())
    assert any(note.startswith("2 of 4 heads a block") for note in notes)


def test_model_with_unknown_heads_is_refused() -> None:
    model = plain_run(style="gpt").build()
    for module in model.modules():
        vars(module).pop("heads", None)
        vars(module).pop("head_width", None)
    with pytest.raises(RefusedError, match="number of heads"):
        MOVING.model(model)
