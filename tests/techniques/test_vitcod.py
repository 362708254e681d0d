"""ViTCoD: attention maps, stored masks, attention with the masks, and the autoencoder of heads."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from adapter_models import theirs
from hypothesis import given, settings
from hypothesis import strategies as st
from image_runs import PIXELS, image_run
from kernel_references import kept_attention_reference
from tiny_runs import advance, losses, plain_run, restored, run_through, snapshot, technique, with_optimizer
from torch import Tensor

from thrifty.composition.compose import compose
from thrifty.core.errors import IntegrityError, RefusedError, UsageError
from thrifty.core.state import TrainState
from thrifty.kernels.attention_filters import vitcod_filter
from thrifty.kernels.attention_filters.keep_masks import exact_scores, visible_pairs
from thrifty.kernels.sparse_attention.block_grid import NONE, WHOLE, BlockGrid
from thrifty.modeling.attention_cores import ATTENTION_SITES
from thrifty.modeling.attention_sites import find_attention_sites
from thrifty.models.hf_wrapper import HuggingFaceCausalLM
from thrifty.techniques.attention._replaced_attention import SWAPPABLE_CORES
from thrifty.techniques.memory.recompute import Recompute

NAME = "attention.vitcod"
START = 2
"""First step with fixed masks, by the settings of tiny runs."""
drawn_masks = st.builds(
    lambda h, t, density, seed: torch.rand(h, t, t, generator=torch.Generator().manual_seed(seed)) < density,
    st.integers(1, 3), st.integers(1, 20), st.floats(0, 1), st.integers(0, 99),
)  # fmt: skip


def started(steps: int, images: bool = True, **chosen: Any) -> tuple[Any, TrainState]:
    plain = image_run() if images else plain_run()
    settings = {"tokens": 0, "autoencoder": False} if images else {"autoencoder": False}
    run = compose(plain, with_optimizer([technique(NAME, **settings | chosen)]), 6)
    state = run.start()
    advance(run, state, steps)
    return run, state


@given(drawn_masks)
def test_masks_survive_a_round_trip_through_text(masks: Tensor) -> None:
    heads, tokens, _ = masks.shape
    text = vitcod_filter.written_masks(masks)
    assert np.array_equal(vitcod_filter.read_masks(text, heads, tokens), masks.numpy())
    with pytest.raises(IntegrityError, match="bits, but"):
        vitcod_filter.read_masks(text, heads, tokens + 3)


@settings(max_examples=25, deadline=None)
@given(masks=drawn_masks, limit=st.integers(0, 12), block=st.integers(1, 5), shared=st.booleans())
def test_split_attention_equals_masked_attention(masks, limit, block, shared):
    heads, tokens, _ = masks.shape
    masks = masks | torch.eye(tokens, dtype=torch.bool)
    order, kept = vitcod_filter.split_blocks(masks.numpy(), limit, block)
    for head in range(heads):
        is_global = masks[head].sum(0) > limit
        assert order[head].tolist() == [*is_global.nonzero().flatten(), *(~is_global).nonzero().flatten()]
    generator = torch.Generator().manual_seed(0)
    groups = 1 if shared else heads
    q, k, v = (
        torch.randn(2, n, tokens, width, generator=generator, dtype=torch.float64).requires_grad_()
        for n, width in ((heads, 4), (groups, 4), (groups, 6))
    )
    codes = torch.where(torch.tensor(kept), WHOLE, NONE).to(torch.int8)[None]
    actual = vitcod_filter.split_attention(
        q, k, v, masks[None], torch.tensor(order), BlockGrid(codes, block, int(kept.sum((1, 2)).max()))
    )
    expected = kept_attention_reference(q, k, v, masks[None])
    torch.testing.assert_close(actual, expected)
    upstream = torch.randn(actual.shape, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(*(torch.autograd.grad(x, (q, k, v), upstream) for x in (actual, expected)))


def test_the_average_map_skips_queries_without_keys() -> None:
    probabilities = torch.rand(3, 2, 4, 4)
    visible = torch.ones(3, 1, 4, 4, dtype=torch.bool)
    visible[0, :, 2:] = False
    probabilities[0, :, 2:] = 0
    actual = vitcod_filter.average_map(probabilities, visible)
    torch.testing.assert_close(actual[:, 0].float(), probabilities[:, :, 0].mean(0))
    torch.testing.assert_close(actual[:, 3].float(), probabilities[1:, :, 3].mean(0))


@pytest.mark.parametrize("images", [True, False], ids=["images", "text"])
def test_masks_follow_the_mean_maps_of_plain_steps(images: bool) -> None:
    _, state = started(START + 1, images)
    actual = state.log[-1].decision["found"]
    plain = image_run() if images else plain_run()
    again = compose(
        plain, with_optimizer([technique("attention.sanger")]), 6
    )  # observed, and plain up to the same step
    bare, maps = again.start(), {}
    for step in range(START):
        assert bare.model is not None
        for place in ATTENTION_SITES.of(bare.model):
            core = SWAPPABLE_CORES.of(bare.model)[place.name]
            core.watch = partial(add_map, maps, place.name, place.causal)
        with torch.no_grad():
            again.objective.predict(bare.model.eval(), again.source.at(step))
        for core in SWAPPABLE_CORES.of(bare.model).values():
            core.watch = None
        advance(again, bare, step + 1)
    for name, each in maps.items():
        average = sum(each) / START
        t = average.shape[-1]
        kept = torch.tensor(vitcod_filter.read_masks(actual[name]["masks"], 4, actual[name]["tokens"]))[:, :t, :t]
        expected = vitcod_filter.informative_pairs(average, 0.4) | torch.eye(t, dtype=torch.bool)
        assert torch.equal(kept, expected if images else expected.tril())
        assert 0.1 < float(kept.float().mean()) < 0.7


def add_map(
    maps: dict[str, list[Tensor]], name: str, causal: bool, q: Tensor, k: Tensor, mask: Tensor | None, bias: None
) -> None:
    scores = exact_scores(q, k).masked_fill(~visible_pairs(q.shape[2], k.shape[2], causal, mask), float("-inf"))
    maps.setdefault(name, []).append(scores.softmax(-1).double().mean(0))


def test_resume_uses_the_logged_masks_and_detects_changes() -> None:
    run, state = started(START + 1)
    kept = snapshot(state)
    advance(run, state, 5)
    resumed = restored(run, kept)
    run.verify(resumed)
    advance(run, resumed, 5)
    assert all(torch.equal(x, snapshot(state).tensors[name]) for name, x in snapshot(resumed).tensors.items())
    ATTENTION_SITES.of(state.model)[1].module.kept_pairs[0, 3] = True
    with pytest.raises(IntegrityError, match=r"the mask of blocks\.1\.attention differs from the run"):
        run.verify(state)


@pytest.mark.parametrize("images", [True, False], ids=["images", "text"])
def test_training_in_blocks_equals_training_under_a_mask(images: bool) -> None:
    tokens, plain = (0, image_run) if images else (16, plain_run)
    runs = []
    for products in ("dense", "blocks"):
        one = technique(NAME, tokens=tokens, autoencoder=False, products=products)
        runs.append(run_through(plain(), with_optimizer([one]), 4)[0])
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), rel=1e-5)
    bare, _ = run_through(plain(), with_optimizer([]), 4)
    assert losses(runs[0])[:START] == losses(bare)[:START] and losses(runs[0])[START] != losses(bare)[START]


def test_the_autoencoder_learns_and_its_error_is_in_the_loss() -> None:
    run = compose(image_run(repeated=True), with_optimizer([technique(NAME, tokens=0, weight=0.01)]), 30)
    state = run.start()
    batch = run.source.at(0)
    first = reconstruction_error(run, state)
    with torch.no_grad():
        judged = run.eval_objective.losses(run.eval_objective.predict(state.model, batch), batch)
    records = advance(run, state)
    assert records[0].loss == pytest.approx(float(judged.mean()) + 0.01 * first, rel=1e-5)
    assert reconstruction_error(run, state) < first and records[-1].loss < 0.7 * records[0].loss


def reconstruction_error(run: Any, state: TrainState) -> float:
    """Return the reconstruction error of queries and keys, averaged over examples and blocks, as a reference."""
    errors: list[float] = []
    places = ATTENTION_SITES.of(state.model)
    cores = [place.module.core for place in places]
    for place, core in zip(places, cores, strict=True):
        place.module.core = partial(record_error, errors, place.module, core)
    with torch.no_grad():
        run.eval_objective.predict(state.model, run.source.at(0))
    for place, core in zip(places, cores, strict=True):
        place.module.core = core
    return sum(errors) / len(errors)


def record_error(errors: list[float], module: Any, core: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    there_and_back = module.decode_queries @ module.encode_queries, module.decode_keys @ module.encode_keys
    apart = [(x.transpose(1, -1) @ m.T - x.transpose(1, -1)).flatten(1).norm(dim=1)
             for x, m in zip((q, k), there_and_back, strict=True)]  # fmt: skip
    assert torch.linalg.matrix_rank(there_and_back[0]) == 2  # of four heads
    errors.append(float(sum(apart).mean()))
    return core(q, k, v)


def test_the_reconstruction_error_is_equal_with_recompute() -> None:
    runs = [run_through(plain_run(), with_optimizer([technique(NAME), *also]), 4)[0] for also in ((), (Recompute(),))]
    assert losses(runs[0]) == losses(runs[1])


def test_plain_export_requires_export_plain() -> None:
    for steps in (1, 3):  # with an autoencoder the function differs from the first step on
        _, state = started(steps, autoencoder=True)
        with pytest.raises(RefusedError, match="outputs would differ"):
            technique(NAME, autoencoder=True).finish(state.model)
        finished = technique(NAME, autoencoder=True, export_plain=True).finish(state.model)
        bare = image_run().build()
        assert finished.state_dict().keys() == bare.state_dict().keys()
        bare.load_state_dict(finished.state_dict())
        torch.testing.assert_close(finished(PIXELS), bare(PIXELS))


def test_longer_texts_and_unknown_lengths_are_refused() -> None:
    with pytest.raises(UsageError, match=r"'16' tokens of blocks\.0\.attention exceed tokens = 8"):
        started(1, images=False, tokens=8)
    with pytest.raises(RefusedError, match="has no position table") as refused:
        started(1, images=False, tokens=0)
    assert "attention.vitcod.tokens" in refused.value.fix
    _, state = started(START + 1, images=False, tokens=16)
    with pytest.raises(UsageError, match="'20' tokens exceed the 16 tokens of the masks"):
        state.model(torch.zeros(1, 20, dtype=torch.int64))


class TestModelsOfTransformers:
    @pytest.mark.parametrize("code", [False, True])
    def test_training_in_decoders_with_shared_keys(self, code: bool) -> None:
        plain = plain_run()
        changed = type(plain)(lambda: HuggingFaceCausalLM(theirs("llama-grouped")), plain.source, plain.objective)
        records, state = run_through(changed, with_optimizer([technique(NAME, tokens=16, autoencoder=code)]), 4)
        assert losses(records)[-1] < losses(records)[0]
        assert len(state.log[-1].decision["found"]) == 2

    def test_image_models_of_transformers_with_full_masks(self) -> None:
        shape = transformers.ViTConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=8,
            patch_size=2, num_channels=1, num_labels=10, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0,
        )  # fmt: skip
        model, one = transformers.ViTForImageClassification(shape).eval(), technique(NAME, tokens=0, autoencoder=False)
        plain = model(PIXELS).logits
        for masks in (torch.ones(4, 17, 17), torch.eye(17).expand(4, 17, 17)):
            for place in find_attention_sites(model):
                assert one.count(model, place) == 4 * 17**2
                actual = {"tokens": 17, "masks": vitcod_filter.written_masks(masks.bool())}
                place.put(one.core(place, {place.name: actual}))
            assert torch.allclose(model(PIXELS).logits, plain, atol=1e-5) == bool(masks.all())
