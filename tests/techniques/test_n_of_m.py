"""N:M sparsity: effective weights, mask computation, masked decay and the dense finish."""

import warnings
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, random_model
from tiny_runs import (
    advance,
    assert_same,
    losses,
    plain_run,
    restored,
    run_through,
    snapshot,
    technique,
    tiny_model,
    with_optimizer,
)
from torch import Tensor, nn

from thrifty.composition.compose import Run, compose
from thrifty.core.errors import IntegrityError, RefusedError, UsageError
from thrifty.core.run_notes import collect_notes
from thrifty.core.state import TrainState
from thrifty.core.technique import Technique
from thrifty.kernels.n_of_m_linear import NOfMProducts
from thrifty.kernels.n_of_m_masks import NOfMPattern, n_of_m_mask
from thrifty.models.hf_wrapper import HuggingFaceCausalLM
from thrifty.techniques.sparsity.n_of_m import (
    MASK,
    NOfM,
    masked_layers,
    remake,
    remove_masked_product,
    use_masked_product,
)

TOKENS = torch.arange(16)[None]
LAYERS = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")


def treated(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if hasattr(module, MASK)}


def started(*chosen: Technique, steps: int = 6, **plain: Any) -> tuple[Run, TrainState, nn.Module]:
    run = compose(plain_run(**plain), with_optimizer(list(chosen)), steps)
    state = run.start()
    assert state.model is not None
    return run, state, state.model


def masks_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: getattr(layer, MASK).clone() for name, layer in treated(model).items()}


@torch.no_grad()
def acting(layer: nn.Module) -> Tensor:
    """Return the effective weight (out, in) of a layer without bias, from unit vectors."""
    return layer(torch.eye(layer.in_features)).T


def test_only_linear_layers_in_blocks_are_treated() -> None:
    with collect_notes() as notes:
        model = NOfM().model(tiny_model(depth=2))
    assert list(treated(model)) == [f"blocks.{block}.{layer}" for block in range(2) for layer in LAYERS]
    text = " ".join(notes)
    assert "8 of 9 modules" in text and "skipped head: it is outside the blocks" in text
    assert "dense products of masked weights" in text
    assert len(treated(NOfM(where="mlp").model(tiny_model(depth=2)))) == 4
    with pytest.raises(RefusedError, match="no module matches 'nowhere'"):
        NOfM(where="nowhere").model(tiny_model(depth=2))


def test_skipped_layers_are_listed_with_reasons() -> None:
    class Odd(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).relu()

    def block() -> nn.Module:
        attention = nn.MultiheadAttention(32, 2)
        layers = {"fits": nn.Linear(32, 6), "narrow": nn.Linear(30, 32), "odd": Odd(32, 32), "a": attention}
        return nn.ModuleDict(layers)

    def model() -> nn.Module:
        return nn.ModuleDict({"blocks": nn.ModuleList(block() for _ in range(2))})

    with collect_notes() as notes:
        assert list(treated(NOfM().model(model()))) == ["blocks.0.fits", "blocks.1.fits"]
    text = " ".join(notes)
    assert "blocks.0.narrow: its 30 inputs and 32 outputs do not divide into groups of 4" in text
    assert "blocks.1.odd: the product of a Odd is unknown" in text
    assert "blocks.0.a.out_proj: its attention reads the weight directly" in text
    with pytest.raises(RefusedError, match="its 32 inputs and 6 outputs do not divide into groups of 4"):
        NOfM(transposable=True, where="fits").model(model())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"n": 4}, "sparsity.n_of_m: the pattern 4:4 keeps no weights or all"),
        ({"n": 4, "m": 8, "transposable": True}, "sparsity.n_of_m: .*116,963,796,250 for 4:8"),
        ({"every": 0}, "every is 0"),
        ({"decay": -1.0}, "decay is -1.0"),
        ({"where": "("}, "where is not a regular expression"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        NOfM(**settings)


@pytest.mark.parametrize(
    "settings",
    [{}, {"transposable": True}, {"n": 1}, {"n": 4, "m": 8, "decay": 0.0}, {"mvue": True, "every": 2}],
    ids=str,
)
def test_effective_weights_are_n_of_m_at_every_step(settings: dict[str, Any]) -> None:
    chosen = NOfM(**settings)
    run, state, model = started(chosen, steps=4)
    for step in range(1, 5):
        advance(run, state, step)
        for layer in treated(model).values():
            weight = acting(layer)
            assert torch.equal(weight != 0, getattr(layer, MASK))
            groups = (weight != 0).unflatten(-1, (-1, chosen.m)).sum(-1)
            assert bool((groups == chosen.n).all())
            if chosen.transposable:
                assert bool(((weight != 0).T.unflatten(-1, (-1, chosen.m)).sum(-1) == chosen.n).all())
            assert bool((layer.weight != 0).all())  # masked weights are kept


def test_masks_follow_the_weights_when_due() -> None:
    run, state, model = started(NOfM(every=3), steps=5)
    before = masks_of(model)
    for step in range(5):
        wanted = {name: n_of_m_mask(layer.weight, 2, 4) for name, layer in treated(model).items()}
        (record,) = advance(run, state, step + 1)
        now = masks_of(model)
        if step % 3 == 0:
            assert all(torch.equal(now[name], wanted[name]) for name in now)
            flips = sum(int((now[name] != before[name]).sum()) for name in now)
            rate = flips / sum(mask.numel() for mask in now.values())
            assert record.notes["mask_flip_rate"] == pytest.approx(rate, rel=1e-6) and (rate > 0) == (step > 0)
        else:
            assert all(torch.equal(now[name], before[name]) for name in now)
            assert any(not torch.equal(wanted[name], before[name]) for name in now)
            assert "mask_flip_rate" not in record.notes
        before = now


def gradients(*chosen: Technique) -> tuple[dict[str, Tensor], nn.Module]:
    run, _, model = started(*chosen)
    run.backward(model.train(), run.objective, run.source.at(0))
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, model


@pytest.mark.parametrize("transposable", [False, True])
def test_gradients_equal_a_model_of_masked_weights(transposable: bool) -> None:
    found, model = gradients(NOfM(decay=0.0, transposable=transposable))
    pattern, plain = NOfMPattern(transposable=transposable), compose(plain_run(), with_optimizer([]), 6)
    masked = plain.start().model
    assert masked is not None
    with torch.no_grad():
        for name in treated(model):
            weight = masked.get_submodule(name).weight
            weight.mul_(pattern.mask(weight))
    plain.backward(masked.train(), plain.objective, plain.source.at(0))
    for name, parameter in masked.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("", {}),
        ("large_batch.gradient_accumulation", {"micro_batches": 4}),
        ("precision.mixed", {"format": "float16"}),
        ("memory.recompute", {}), ("memory.share_parameters", {"groups": 2}),
    ],
)  # fmt: skip
def test_masked_decay_is_added_once_a_step(name: str, settings: dict[str, Any]) -> None:
    others = [technique(name, **settings)] if name else []
    without, _ = gradients(NOfM(decay=0.0), *others)
    found, model = gradients(NOfM(decay=0.5), *others)
    layers = treated(model)
    for parameter, gradient in found.items():
        layer = layers.get(parameter.removesuffix(".weight"))
        added = torch.zeros_like(gradient)
        if layer is not None:
            added = 0.5 * layer.weight.detach() * ~n_of_m_mask(layer.weight, 2, 4)
            assert added.any()
        torch.testing.assert_close(gradient, without[parameter] + added, rtol=1e-5, atol=1e-6, msg=parameter)


def test_decay_keeps_masks_from_flipping() -> None:
    rates = {}
    for decay in (0.0, 0.1):
        records, _ = run_through(plain_run(), with_optimizer([NOfM(decay=decay)]), 25)
        rates[decay] = sum(record.notes["mask_flip_rate"] for record in records[10:])
    assert rates[0.1] < 0.8 * rates[0.0]


def test_dense_finish_equals_a_plain_run() -> None:
    run, state, model = started(NOfM(dense_from=2), steps=5)
    first = advance(run, state, 2)
    assert all("mask_flip_rate" in record.notes for record in first)
    plain = compose(plain_run(), with_optimizer([]), 5)
    values, bare = snapshot(state), plain.start()
    bare.step = 2
    for name, tensor in bare.tensors().items():
        tensor.copy_(values.tensors[name])
    bare.load_scalars(values.scalars)
    records, wanted = advance(run, state), advance(plain, bare)
    assert losses(records) == losses(wanted) and not any("mask_flip_rate" in record.notes for record in records)
    assert all(bool(mask.all()) for mask in masks_of(model).values())
    for name, tensor in bare.tensors().items():
        assert torch.equal(tensor, state.tensors()[name]), name
    getattr(treated(model)["blocks.0.mlp.up"], MASK)[0, 0] = False
    with pytest.raises(IntegrityError, match=r"sparsity\.n_of_m: blocks\.0\.mlp\.up is masked at step 5"):
        run.verify(state)


@pytest.mark.parametrize("settings", [{}, {"transposable": True}, {"dense_from": 0.5}], ids=str)
def test_exported_model_computes_the_same(settings: dict[str, Any]) -> None:
    chosen = NOfM(**settings)
    run, state, model = started(chosen, steps=4)
    advance(run, state)
    dense = bool(settings.get("dense_from"))
    with torch.no_grad():
        before = model.eval().head(model(TOKENS))
        trained = model.blocks[0].mlp.up.weight.clone()
        finished = chosen.finish(model)
        plain = tiny_model()
        plain.load_state_dict(finished.state_dict())
        after = plain.eval().head(plain(TOKENS))
    assert float((after - before).abs().max()) < 1e-6
    weight = plain.blocks[0].mlp.up.weight
    assert torch.equal(weight, trained if dense else trained * chosen.pattern.mask(weight))
    assert not any("forward" in vars(module) or hasattr(module, MASK) for module in finished.modules())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("saved", [2, 3, 5])
@pytest.mark.parametrize("mvue", [False, True])
def test_resume_between_mask_computations_is_exact(saved: int, mvue: bool) -> None:
    chosen = with_optimizer([NOfM(every=3, dense_from=5, mvue=mvue)])
    records, expected = run_through(plain_run(), chosen, 7)
    run = compose(plain_run(), chosen, 7)
    state = run.start()
    first = advance(run, state, saved)
    again = compose(plain_run(), chosen, 7)
    resumed = restored(again, snapshot(state))
    assert losses(first + advance(again, resumed)) == losses(records)
    assert_same(snapshot(resumed), snapshot(expected))


def test_fork_of_a_dense_run_masks_its_weights() -> None:
    plain = compose(plain_run(), with_optimizer([]), 6)
    bare = plain.start()
    advance(plain, bare, 3)
    run, state, model = started(NOfM(every=4, dense_from=5), steps=6)
    values = snapshot(bare)
    for name, tensor in state.tensors().items():
        if name in values.tensors:
            tensor.copy_(values.tensors[name])
    state.load_scalars(values.scalars)
    wanted = {name: n_of_m_mask(layer.weight, 2, 4) for name, layer in treated(model).items()}
    assert any(not torch.equal(mask, wanted[name]) for name, mask in masks_of(model).items())
    advance(run, state, 4)  # no multiple of four, but no masks exist yet
    assert all(torch.equal(mask, wanted[name]) for name, mask in masks_of(model).items())
    advance(run, state, 5)
    assert not any(bool(mask.all()) for mask in masks_of(model).values())
    advance(run, state, 6)
    assert all(bool(mask.all()) for mask in masks_of(model).values())


@pytest.mark.parametrize("transposable", [False, True])
def test_excess_density_raises_integrity_error(transposable: bool) -> None:
    run, state, model = started(NOfM(transposable=transposable))
    run.verify(state)
    mask = getattr(treated(model)["blocks.1.mlp.down"], MASK)
    row = torch.tensor([True, True, False, False])
    mask.copy_(row.repeat(mask.shape[0], mask.shape[1] // 4))  # valid along inputs only
    if transposable:
        with pytest.raises(IntegrityError, match="keeps more than 2:4 along inputs and outputs"):
            run.verify(state)
    else:
        run.verify(state)
        mask[0, 2] = True
        with pytest.raises(IntegrityError, match=r"n_of_m: the mask of blocks\.1\.mlp\.down keeps more than 2:4$"):
            run.verify(state)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ("sparsity.rigl", "two independent masks"),
        ("adapters.lora", "a merged adapter is not N:M sparse"),
        ("precision.float8", "both decide the linear products"),
    ],
)
def test_conflicting_techniques_are_refused(other: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as refused:
        compose(plain_run(), with_optimizer([NOfM(), technique(other)]), 4)
    assert other in refused.value.what and "sparsity.n_of_m" in refused.value.what


def test_mask_is_computed_from_the_float32_weight() -> None:
    run, state, model = started(NOfM(), technique("precision.mixed"))
    layer = treated(model)["blocks.0.mlp.up"]
    with torch.no_grad():  # equal in bfloat16, which would keep the first two
        layer.weight[0, :4] = torch.tensor([1.0, 1.0005, 1.001, 1.0015])
    advance(run, state, 1)
    assert getattr(layer, MASK)[0, :4].tolist() == [False, False, True, True]
    assert layer.weight.dtype == torch.float32


@pytest.mark.slow
def test_compiled_blocks_are_exact() -> None:
    torch._dynamo.reset()
    chosen, plain = NOfM(dense_from=2), plain_run(depth=1)
    wanted, expected = run_through(plain, with_optimizer([chosen]), 3)
    found, state = run_through(plain, with_optimizer([chosen, technique("compile")]), 3)
    assert losses(found) == pytest.approx(losses(wanted), rel=1e-5)
    assert state.model is not None and expected.model is not None
    assert all(torch.equal(mask, masks_of(state.model)[name]) for name, mask in masks_of(expected.model).items())


def test_grown_blocks_copy_masks() -> None:
    chosen = NOfM(every=10), technique("growth.stacking", at=(2,))
    run, state, model = started(*chosen, steps=4)
    advance(run, state, 2)
    before, saved = masks_of(model), snapshot(state)
    run.changes(state)
    assert state.model is not None
    grown = masks_of(state.model)
    assert len(grown) == 2 * len(before)
    assert torch.equal(grown["blocks.2.mlp.up"], before["blocks.0.mlp.up"])
    advance(run, state)
    again, _, _ = started(*chosen, steps=4)
    resumed = restored(again, saved)
    advance(again, resumed)
    assert_same(snapshot(resumed), snapshot(state))


@pytest.mark.parametrize("transposable", [False, True])
def test_conv1d_is_masked_along_its_inputs(transposable: bool) -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    convolution, linear = conv1d(24, 16), nn.Linear(16, 24)
    with torch.no_grad():
        linear.weight.copy_(convolution.weight.T)
        linear.bias.copy_(convolution.bias)
    x, found = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)), []
    for layer in (convolution, linear):
        use_masked_product(layer, NOfMProducts(NOfMPattern(transposable=transposable)))
        result = layer(x)
        result.square().sum().backward()
        found.append(result.detach())
    assert torch.equal(getattr(convolution, MASK).T, getattr(linear, MASK))
    assert torch.equal(*found)
    assert torch.equal(convolution.weight.grad.T, linear.weight.grad)
    with torch.no_grad():
        convolution.weight.neg_()
        convolution.weight[0] *= 100
    changed, places = remake([convolution]).tolist()
    assert 0 < changed < places == 16 * 24
    remove_masked_product(convolution)
    assert list(convolution.state_dict()) == ["weight", "bias"] and "forward" not in vars(convolution)
    assert bool(((convolution.weight != 0).T.unflatten(-1, (-1, 4)).sum(-1) == 2).all())


def test_gpt2_is_treated_and_exported() -> None:
    model = HuggingFaceCausalLM(random_model(FAMILIES["gpt2"]())).eval()
    names = list(model.state_dict())
    NOfM(transposable=True).model(model)
    assert {name.rpartition(".")[2] for name in treated(model)} == {"c_attn", "c_proj", "c_fc"}
    assert len(treated(model)) == 8
    with torch.no_grad():
        before = model(TOKENS)
        after = NOfM().finish(model)(TOKENS)
    torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-6)
    assert list(model.state_dict()) == names


def updates_of_my_own(model: nn.Module, remakes: bool) -> list[dict[str, Tensor]]:
    """Return the masks at three forward passes in training, with an update after each."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=3.0), []
    tokens = plain_run().source.at(0)["tokens"]
    for _ in range(3):
        seen.append(masks_of(model))
        model(tokens[:, :-1]).float().square().mean().backward()
        optimizer.step()
        if remakes:
            remake(masked_layers(model))
    return seen


def test_own_loop_warns_of_stale_masks() -> None:
    model = NOfM().model(plain_run().build().train())
    with pytest.warns(UserWarning, match=r"remake\(masked_layers\(model\)\)"):
        first, *later = updates_of_my_own(model, remakes=False)
    assert all(torch.equal(mask, each[name]) for each in later for name, mask in first.items())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = NOfM().model(plain_run().build().train())
        first, *later = updates_of_my_own(model, remakes=True)
        assert not all(torch.equal(mask, later[-1][name]) for name, mask in first.items())
        model.eval()(plain_run().source.at(0)["tokens"])


@pytest.mark.parametrize("every", [1, 3])
def test_trainer_does_not_warn(every: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run, state, _ = started(technique("sparsity.n_of_m", every=every))
        advance(run, state)
