"""Formulas of small techniques."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from tiny_runs import advance, plain_run, run_through, technique, tiny_model, with_optimizer
from torch import Tensor, nn
from torch._dynamo.utils import counters

from thrifty.composition.compose import compose
from thrifty.composition.explain import explain
from thrifty.core.backward import plain_backward
from thrifty.core.batches import Batch
from thrifty.core.errors import RefusedError
from thrifty.core.objective import Objective, Prediction
from thrifty.objectives.next_token import NextToken
from thrifty.techniques.curriculum._size_schedule import phased_size
from thrifty.techniques.curriculum.sequence_length import SequenceLengthWarmup
from thrifty.techniques.growth._depth_growth import stacked_origin
from thrifty.techniques.initializations.layer_scale import LayerScale, initial_gain
from thrifty.techniques.large_batch.gradient_accumulation import accumulated
from thrifty.techniques.losses.z_loss import ZLoss
from thrifty.techniques.memory.recompute import Recompute

TOKENS = torch.arange(16)[None]


@pytest.mark.parametrize(
    ("depth", "gain"), [(1, 0.1), (12, 0.1), (18, 0.1), (19, 1e-5), (24, 1e-5), (25, 1e-6), (36, 1e-6)]
)
def test_initial_gains_equal_the_paper(depth: int, gain: float) -> None:
    assert initial_gain(depth) == gain
    model = LayerScale().model(tiny_model(depth=depth))
    gains = [parameter for name, parameter in model.named_parameters() if name.endswith(".gain")]
    assert len(gains) == 2 * depth
    assert all(torch.equal(parameter, torch.full((32,), gain)) for parameter in gains)


def test_gains_multiply_each_branch() -> None:
    model = LayerScale(initial_value=0.0625).model(tiny_model(depth=3, style="gpt"))
    plain = tiny_model(depth=3, style="gpt")
    with torch.no_grad():
        for block in plain.blocks:
            for linear in (block.attention.out, block.mlp.down):
                linear.weight.mul_(0.0625)  # a power of two: exact
                linear.bias.mul_(0.0625)
    torch.testing.assert_close(model.eval()(TOKENS), plain.eval()(TOKENS), rtol=1e-6, atol=1e-6)


@given(
    start=some.integers(8, 64), full=some.integers(8, 512), until=some.integers(1, 100),
    phases=some.integers(1, 8), multiple=some.sampled_from([1, 8, 16]),
)  # fmt: skip
def test_lengths_grow_in_equal_phases(start: int, full: int, until: int, phases: int, multiple: int) -> None:
    found = [phased_size(step, min(start, full), full, until, multiple, phases) for step in range(until + 3)]
    assert found == sorted(found) and found[until:] == [full] * 3
    assert all(length % multiple == 0 or length == full for length in found)
    assert all(0 < length <= full for length in found)
    assert len(set(found)) <= phases + 1


def test_batches_are_truncated_to_the_length() -> None:
    short = technique("curriculum.sequence_length", start=8, until=4, phases=2, multiple=4)
    run = compose(plain_run(), with_optimizer([short]), 6)
    assert [run.source.at(step)["tokens"].shape[1] - 1 for step in range(6)] == [8, 8, 12, 12, 16, 16]
    assert torch.equal(run.source.at(0)["tokens"], plain_run().source.at(0)["tokens"][:, :9])


def test_only_texts_are_shortened() -> None:
    source = SequenceLengthWarmup().batches(compose(plain_run(), with_optimizer([]), 1).source)
    source.source.rows = lambda step, start, stop: Batch({"image": torch.zeros(4, 3)}, torch.ones(4))
    with pytest.raises(RefusedError, match="can truncate integers"):
        source.at(0)


@pytest.mark.parametrize(("old", "new"), [(3, 6), (2, 8), (1, 4), (3, 5)])
def test_whole_stack_is_repeated(old: int, new: int) -> None:
    assert [stacked_origin(block, old) for block in range(new)] == (list(range(old)) * new)[:new]


def test_recompute_frees_inner_activations() -> None:
    def activations(*names: str, **settings: object) -> float:
        chosen = with_optimizer([technique(name, **settings) for name in names])
        return explain(compose(plain_run(batch=16, depth=4), chosen, 2)).footprint.activations

    plain, half, whole = activations(), *(activations("memory.recompute", every=every) for every in (2, 1))
    one_block = (plain - whole) / 4
    inputs = 16 * 16 * 32 * 4
    assert half == pytest.approx(plain - 2 * one_block, rel=0.01)
    assert whole < plain / 4 and whole > 4 * inputs


def test_recomputed_blocks_run_twice() -> None:
    model = tiny_model(depth=2)
    calls: list[int] = []
    for index, block in enumerate(model.blocks):
        block.attention_norm.register_forward_hook(lambda *_, index=index: calls.append(index))
    model = Recompute().model(model)
    model(TOKENS).sum().backward()
    assert calls == [0, 1, 1, 0]
    with torch.no_grad():
        model(TOKENS)
    assert calls[4:] == [0, 1]


@pytest.mark.parametrize("tied", [True, False])
def test_z_loss_equals_autograd(tied: bool) -> None:
    plain = plain_run(tied=tied)
    run = compose(plain, with_optimizer([technique("losses.z_loss", coefficient=0.1)]), 1)
    state = run.start()
    assert state.model is not None
    batch = run.source.at(0)
    outcome = run.backward(state.model, run.objective, batch)
    model = plain.build().double()
    logits = model.head(model(batch["tokens"][:, :-1]))
    targets = batch["tokens"][:, 1:]
    normalizer = logits.logsumexp(-1)
    losses = normalizer - logits.gather(-1, targets[..., None]).squeeze(-1) + 0.1 * normalizer.square()
    losses.mean().backward()
    assert float(outcome.loss) == pytest.approx(losses.mean().item(), rel=1e-6)
    for found, wanted in zip(state.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.grad.double(), wanted.grad, rtol=1e-4, atol=1e-6)


class Weighed(NextToken):
    """Next tokens with unequal weights, most of them zero."""

    def shares(self, batch: Batch) -> Tensor:
        weights = torch.rand(batch["tokens"][:, 1:].shape, generator=torch.Generator().manual_seed(0))
        weights = weights * (weights > 0.7)
        return weights / weights.sum(1, keepdim=True)


@pytest.mark.parametrize("as_logits", [False, True])
def test_z_loss_uses_the_weights_of_the_loss(as_logits: bool) -> None:
    plain = plain_run()
    model, batch = plain.build(), plain.source.at(0)
    logits = model.head(model(batch["tokens"][:, :-1]))
    given = Prediction(output=logits) if as_logits else Prediction(model(batch["tokens"][:, :-1]), model.head)
    objective = Weighed()
    wanted = (0.1 * logits.logsumexp(-1).square() * objective.shares(batch)).sum(1)
    losses = objective.losses(given, batch).detach()
    found = ZLoss(coefficient=0.1).objective(objective).losses(given, batch)
    torch.testing.assert_close(found - losses, wanted, rtol=1e-4, atol=1e-6)


def test_normalizers_are_computed_on_request() -> None:
    plain = plain_run()
    model, batch = plain.build(), plain.source.at(0)
    given = Prediction(output=model.head(model(batch["tokens"][:, :-1])))
    NextToken().losses(given, batch)
    assert given.normalizers is None
    torch.testing.assert_close(NextToken().normalizers(given, batch), given.logits.logsumexp(-1))


class Doubles(Objective):
    """Cross-entropy in float64."""

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        return Prediction(output=model.logits(batch["tokens"][:, :-1]))

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        chosen = prediction.logits.log_softmax(-1).gather(-1, batch["tokens"][:, 1:, None])
        return -chosen.squeeze(-1).mean(1)


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 7, 10])
def test_micro_batches_sum_to_the_whole_batch(parts: int) -> None:
    """Example weights are fixed for the effective batch, so that no mean of means is computed."""
    batch = plain_run(batch=7).source.at(0)
    batch = batch.weighted(torch.rand(7, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    gradients, losses = [], []
    for backward in (plain_backward, accumulated(plain_backward, parts)):
        model = tiny_model(depth=2).double()
        losses.append(float(backward(model, Doubles(), batch).loss))
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for found, wanted in zip(*gradients, strict=True):
        assert (found - wanted).abs().max() <= 1e-12 * max(1.0, float(wanted.abs().max()))


def test_mixed_precision_keeps_losses_in_float32() -> None:
    seen: list[torch.dtype] = []
    plain = plain_run(depth=1)

    def build() -> nn.Module:
        model = plain.build()
        model.blocks[0].mlp.up.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
        return model

    chosen = with_optimizer([technique("precision.mixed")])
    records, state = run_through(type(plain)(build, plain.source, plain.objective), chosen, 2)
    assert set(seen) == {torch.bfloat16}
    assert all(tensor.dtype == torch.float32 for tensor in state.tensors().values())
    assert records[0].loss == pytest.approx(run_through(plain, with_optimizer([]), 1)[0][0].loss, rel=1e-2)


@pytest.mark.parametrize("style", ["llama", "gpt"])
def test_mixed_precision_works_with_any_head(style: str) -> None:
    plain = plain_run(depth=1, style=style, tied=False)
    chosen = with_optimizer([technique("precision.mixed"), technique("adapters.lora", where="head|mlp")])
    records, _ = run_through(plain, chosen, 2)
    assert all(not record.skipped for record in records)


def test_compile_requires_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    run = compose(plain_run(), with_optimizer([technique("compile", backend="inductor")]), 1)
    with pytest.raises(RefusedError, match="requires a C\\+\\+ compiler") as refused:
        run.start()
    assert "g++" in refused.value.fix


def test_one_compilation_serves_all_blocks() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    run_through(plain_run(depth=4), with_optimizer([technique("compile")]), 2)
    blocks_and_loss = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    run_through(plain_run(depth=2), with_optimizer([technique("compile")]), 2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == blocks_and_loss


@pytest.mark.parametrize("others", [[], ["memory.optimal_recompute"]])
def test_blocks_are_compiled_after_counting(others: list[str]) -> None:
    torch._dynamo.reset()
    counters.clear()
    chosen = [technique("compile", backend="eager"), *map(technique, others)]
    run = compose(plain_run(), with_optimizer(chosen), 2)
    explain(run)
    assert not counters["frames"]
    advance(run, run.start())
    assert counters["frames"]["ok"] >= 1
