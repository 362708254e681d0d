"""Techniques that replace attention cores: results, supported models, phases and calibration."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from adapter_models import TOKENS, theirs
from image_runs import PIXELS, tiny_vit
from kernel_references import kept_attention_reference, window_mask
from own_gpt import Block, NanoGPT
from tiny_runs import advance, losses, plain_run, restored, run_through, snapshot, technique, with_optimizer
from torch import Tensor, nn

from thrifty.composition.compose import compose
from thrifty.core.errors import IntegrityError, RefusedError
from thrifty.core.run_notes import collect_notes
from thrifty.core.state import TrainState
from thrifty.kernels.attention_filters import dota_filter, elsa_filter, sanger_filter
from thrifty.kernels.attention_filters.keep_masks import exact_scores, visible_pairs
from thrifty.kernels.tiled_attention import causal_attention_reference, full_attention, segment_mask
from thrifty.modeling.attention_cores import ATTENTION_SITES, LOSING_CORES, hides_later_keys
from thrifty.modeling.attention_sites import find_attention_sites
from thrifty.models.hf_wrapper import HuggingFaceCausalLM
from thrifty.techniques.memory.recompute import Recompute

CALIBRATED = ("attention.elsa", "attention.sanger")
FIXED = ("attention.window", "attention.block_sparse")
START = 2
"""First step with replaced attention, by the settings of tiny runs."""


def started(name: str, steps: int = 4, **settings: Any) -> tuple[Any, TrainState]:
    run = compose(plain_run(), with_optimizer([technique(name, **settings)]), 6)
    state = run.start()
    advance(run, state, steps)
    return run, state


def recorded_calls(model: nn.Module, *inputs: Tensor) -> dict[str, tuple[Tensor, ...]]:
    """Return the inputs and the output of each core in one forward pass."""
    seen: dict[str, tuple[Tensor, ...]] = {}
    for place in ATTENTION_SITES.of(model):
        core = place.module.core

        def watch(*given: Tensor, name: str = place.name, core: Any = core) -> Tensor:
            seen[name] = (*given, core(*given))
            return seen[name][-1]

        place.module.core = watch
    with torch.no_grad():
        model.eval()(*inputs)
    return seen


def text(seed: int = 0, rows: int = 2, length: int = 16) -> Tensor:
    return torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "name", ["attention.elsa", "attention.sanger", "attention.dota", "attention.a3", "attention.spatten"]
)
def test_a_filter_changes_nothing_before_from_step(name: str) -> None:
    settings = {"weight": 0.0} if name == "attention.dota" else {}
    plain, _ = run_through(plain_run(), with_optimizer([]), 4)
    actual, _ = run_through(plain_run(), with_optimizer([technique(name, **settings)]), 4)
    assert losses(actual)[:START] == losses(plain)[:START]
    assert losses(actual)[START] != losses(plain)[START]


def test_a_window_hides_distant_tokens_and_patches() -> None:
    for model, given, causal in ((plain_run().build(), text(), True), (tiny_vit(), PIXELS, False)):
        model = technique("attention.window", window=3, global_tokens=1, block=4).model(model)
        for q, k, v, output in recorded_calls(model, given).values():
            keep = window_mask(q.shape[2], 3, 1, causal)
            torch.testing.assert_close(output, kept_attention_reference(q, k, v, keep))


@pytest.mark.parametrize("name", FIXED)
def test_packed_texts_do_not_attend_to_each_other(name: str) -> None:
    model = technique(name).model(plain_run().build())
    segments = torch.tensor([[0] * 5 + [1] * 11, [0] * 9 + [1] * 7])
    place = ATTENTION_SITES.of(model)[0]
    assert place.plain is causal_attention_reference
    for q, k, v, mask, output in recorded_calls(model, text(), segments).values():
        assert torch.equal(mask, segment_mask(segments))
        changed = k.clone()
        changed[0, :, :5], changed[1, :, :9] = 9.0, 9.0
        actual, same = (technique(name).core(place, {})(q, keys, v, mask) for keys in (changed, k))
        torch.testing.assert_close(actual[0, :, 5:], same[0, :, 5:])
        torch.testing.assert_close(actual[1, :, 9:], same[1, :, 9:])
        assert output.shape == q.shape


def test_a_full_window_equals_plain_attention() -> None:
    tokens = text()
    models = [plain_run().build(), technique("attention.window", window=16, block=4).model(plain_run().build())]
    outputs = [model(tokens) for model in models]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    grads = [
        torch.autograd.grad(out.square().sum(), list(m.parameters())[:-1])
        for out, m in zip(outputs, models, strict=True)
    ]
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_finishing_restores_the_attention_of_transformers(implementation: str) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, vocab_size=300, attn_implementation=implementation)
    model = transformers.LlamaForCausalLM(config).eval()
    before = model(input_ids=text()).logits
    window = technique("attention.window", window=3, block=4, export_plain=True)
    for _ in range(2):  # a second replacement works too
        model = window.model(model)
        assert not torch.allclose(model(input_ids=text()).logits, before, atol=1e-4)
        model = window.finish(model)
        assert model.config._attn_implementation == implementation
        assert torch.equal(model(input_ids=text()).logits, before)


def test_elsa_logs_the_mean_threshold_of_plain_steps() -> None:
    _, state = started("attention.elsa")
    (plain, chosen) = [entry.decision for entry in state.log]
    assert plain["phase"] == "plain" and chosen["phase"] == "chosen"

    again = compose(plain_run(), with_optimizer([]), 6)
    bare, actual = again.start(), {}
    for step in range(START):
        batch = again.source.at(step)
        assert bare.model is not None
        for place in find_attention_sites(bare.model):

            def watch(q: Tensor, k: Tensor, v: Tensor, name: str = place.name) -> Tensor:
                samples = elsa_filter.threshold_samples(q, k, 4.0, visible_pairs(q.shape[2], k.shape[2], True))
                actual.setdefault(name, []).append(float(samples.mean()))
                return causal_attention_reference(q, k, v)

            place.module.core = watch
        with torch.no_grad():
            again.objective.predict(bare.model, batch)
        for module in bare.model.modules():
            if hasattr(module, "qkv"):
                module.core = causal_attention_reference
        advance(again, bare, step + 1)
    assert chosen["found"] == pytest.approx({name: sum(values) / START for name, values in actual.items()}, rel=1e-5)


@pytest.mark.parametrize("name", CALIBRATED)
def test_calibration_changes_neither_weights_nor_random_state(name: str) -> None:
    """With dropout, a changed weight or random state would change the losses."""
    chosen = with_optimizer([technique(name, from_step=5)])
    actual, _ = run_through(plain_run(style="gpt", dropout=0.3), chosen, 5)
    plain, _ = run_through(plain_run(style="gpt", dropout=0.3), with_optimizer([]), 5)
    assert losses(actual) == losses(plain)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CALIBRATED)
@pytest.mark.parametrize("saved", [1, START, 3])
def test_resume_around_from_step_is_bit_identical(name: str, saved: int) -> None:
    run, straight = started(name, saved)
    kept = snapshot(straight)
    advance(run, straight, 5)
    again = compose(plain_run(), with_optimizer([technique(name)]), 6)
    resumed = restored(again, kept)
    again.verify(resumed)
    advance(again, resumed, 5)
    assert snapshot(resumed).scalars == snapshot(straight).scalars
    assert all(torch.equal(x, snapshot(straight).tensors[n]) for n, x in snapshot(resumed).tensors.items())


def test_sanger_keeps_the_predicted_pairs() -> None:
    _, state = started("attention.sanger")
    actual = state.log[-1].decision["found"]
    for name, (q, k, v, output) in recorded_calls(state.model, text()).items():
        visible = visible_pairs(16, 16, True)
        keep = sanger_filter.sanger_keep(q, k, 0.2, 4, tuple(actual[name]), visible)
        assert 0.1 < float(keep.sum() / visible.expand_as(keep).sum()) < 0.95
        torch.testing.assert_close(output, kept_attention_reference(q, k, v, keep))


@pytest.mark.slow
@pytest.mark.parametrize("products", ["dense", "rows"])
def test_dota_keeps_equally_many_keys_and_its_detector_learns(products: str) -> None:
    run, state = started("attention.dota", 1, products=products, weight=1.0)
    before = detector_error(state)
    advance(run, state, 5)
    assert detector_error(state) < before
    assert state.model is not None
    for place, detector in zip(ATTENTION_SITES.of(state.model), LOSING_CORES.of(state.model), strict=True):
        q, k, v = (torch.randn(1, heads, 16, 8) for heads in (4, 2, 2))
        detector.input = torch.randn(1, 16, 32)
        with torch.no_grad():
            keep = dota_filter.keep_of(
                dota_filter.balanced_keys(detector.estimate(), 3, visible_pairs(16, 16, True)), 16
            )
            torch.testing.assert_close(detector(q, k, v), kept_attention_reference(q, k, v, keep))
        assert keep.sum(-1).flatten().tolist() == [1, 2, *[3] * 14] * 4
        assert place.module.core is detector


def test_dota_estimates_have_size_one_and_depend_on_position() -> None:
    _, state = started("attention.dota", 0)
    assert state.model is not None
    for detector in LOSING_CORES.of(state.model):
        detector.input = torch.randn(8, 16, 32, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            assert 0.4 < float(detector.estimate().std()) < 2.5
            detector.input = detector.input[:, :1].expand(8, 16, 32)  # the same token everywhere
            last = detector.estimate()[:, :, -1]
        assert (last.std(-1) > 0.01).all()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("style", ["llama", "gpt"])
@pytest.mark.parametrize(
    "name", [*FIXED, *CALIBRATED, *(f"attention.{n}" for n in ("a3", "dota", "spatten", "vitcod"))]
)
def test_visible_keys_do_not_depend_on_later_tokens(name: str, style: str) -> None:
    run = compose(plain_run(style=style), with_optimizer([technique(name)]), 6)
    state = run.start()
    advance(run, state, 4)
    assert state.model is not None
    model, tokens = state.model.eval(), text()
    with torch.no_grad():
        whole = model(tokens)
        for count in (1, 3, 8, 12, 15):
            torch.testing.assert_close(model(tokens[:, :count]), whole[:, :count], rtol=1e-4, atol=1e-4)


def test_resume_restores_the_key_count_of_dota() -> None:
    run, state = started("attention.dota")
    resumed = restored(run, snapshot(state))
    short = text()[:, :8]
    with torch.no_grad():
        actual, expected = (each.model.eval()(short) for each in (resumed, state) if each.model is not None)
    assert torch.equal(actual, expected)


def test_dota_keeps_a_share_of_each_example_in_an_encoder() -> None:
    model = technique("attention.dota", from_step=0).model(tiny_vit())
    (place, *_), (detector, *_) = ATTENTION_SITES.of(model), LOSING_CORES.of(model)
    q, k, v = (torch.randn(2, 4, 20, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    detector.input = torch.randn(2, 20, 32, generator=torch.Generator().manual_seed(3))
    seen = torch.arange(20) < torch.tensor([20, 10])[:, None]
    with torch.no_grad():
        together = detector(q, k, v, seen[:, None, None])
        detector.input = detector.input[1:, :10]
        alone = detector(q[1:, :, :10], k[1:, :, :10], v[1:, :, :10])
    torch.testing.assert_close(together[1:, :, :10], alone)
    assert place.module.longest_text == 0


def test_dota_keeps_keys_by_their_position_bias() -> None:
    model = technique("attention.dota", from_step=0).model(tiny_vit())
    (detector, *_) = LOSING_CORES.of(model)
    q, k, v = (torch.randn(2, 4, 20, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    detector.input = torch.randn(2, 20, 32, generator=torch.Generator().manual_seed(3))
    bias = torch.full((1, 1, 20, 20), -1e3)
    bias[..., 0] = 0.0
    with torch.no_grad():
        torch.testing.assert_close(detector(q, k, v, bias=bias), v[:, :, :1].expand_as(v))


class MaskedBlock(Block):
    """A block that is causal by a mask."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(self.ln_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        past = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        x = x + self.c_proj(F.scaled_dot_product_attention(q, k, v, past).transpose(1, 2).flatten(2))
        return x + self.proj(F.gelu(self.fc(self.ln_2(x))))


def masked_copy(model: nn.Module) -> nn.Module:
    masked = copy.deepcopy(model)
    for block in masked.h:
        block.__class__ = MaskedBlock
    return masked


@pytest.mark.parametrize("name", ["attention.spatten", "attention.dota"])
def test_decoders_with_a_mask_keep_the_same_keys(name: str) -> None:
    plain, tokens = NanoGPT(32, 4, 256, 16), text()
    outputs = []
    for model in (plain, masked_copy(plain)):
        model = technique(name, from_step=0).model(model)
        model(tokens)  # the longest text so far
        with torch.no_grad():
            outputs.append(model(tokens[:, :8]))
    torch.testing.assert_close(*outputs)


class GivenMask(nn.Module):
    """Blocks that are causal by a mask of the model."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(4))
        self.wte, self.h = nn.Embedding(256, 16), nn.ModuleList(layers)

    def forward(self, tokens: Tensor) -> Tensor:
        x, later = self.wte(tokens), torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        for block in self.h:
            x = block(x, later)
        return x


@pytest.mark.parametrize("build", [lambda: masked_copy(NanoGPT(32, 4, 256, 16)), GivenMask], ids=["own", "given"])
@pytest.mark.parametrize("name", ["attention.spatten", "attention.dota"])
def test_compiled_decoders_with_a_mask_keep_the_same_keys(name: str, build: Any) -> None:
    model = technique(name, from_step=0).model(build())
    model(text())  # the longest text so far
    with torch.no_grad():
        expected = model(text()[:, :8])
        torch.testing.assert_close(torch.compile(model, backend="eager")(text()[:, :8]), expected)


@pytest.mark.parametrize("name", ["attention.spatten", "attention.dota"])
def test_known_decoders_do_not_read_their_masks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = technique(name, from_step=0).model(masked_copy(NanoGPT(32, 4, 256, 16)))
    monkeypatch.setattr(Tensor, "triu", lambda *args: pytest.fail("a mask was read"))
    model(text())


def test_random_blocks_that_a_mask_hides_are_named() -> None:
    model = NanoGPT(32, 2, 256, 16)
    for each, is_named in ((masked_copy(model), True), (model, False)):
        with collect_notes() as notes:
            technique("attention.block_sparse").model(each)
        assert any("later blocks, which the mask of the model hides" in note for note in notes) == is_named


def detector_error(state: TrainState) -> float:
    errors: list[float] = []
    assert state.model is not None
    for place, detector in zip(ATTENTION_SITES.of(state.model), LOSING_CORES.of(state.model), strict=True):

        def watch(q: Tensor, k: Tensor, v: Tensor, detector: Any = detector) -> Tensor:
            exact = exact_scores(q, k)
            errors.append(
                float(dota_filter.detector_loss(detector.estimate(), exact, visible_pairs(16, 16, True)).mean())
            )
            return detector(q, k, v)

        place.module.core = watch
    with torch.no_grad():
        state.model(text())
    for place, detector in zip(ATTENTION_SITES.of(state.model), LOSING_CORES.of(state.model), strict=True):
        place.module.core = detector
    return sum(errors)


def test_the_loss_of_dota_is_equal_with_recompute() -> None:
    runs = [run_through(plain_run(), with_optimizer([technique("attention.dota"), *also]), 4)[0]
            for also in ((), (Recompute(),))]  # fmt: skip
    assert losses(runs[0]) == losses(runs[1])


def test_segment_recompute_is_refused_with_detectors() -> None:
    run = compose(plain_run(), with_optimizer([technique("attention.dota"), Recompute(schedule="sqrt")]), 4)
    with pytest.raises(RefusedError, match="return an additional loss"):
        run.start()


def test_held_out_losses_exclude_the_detector_loss() -> None:
    run, state = started("attention.dota", weight=100.0)
    batch = run.source.at(0)
    with torch.no_grad():
        judged = run.eval_objective.losses(run.eval_objective.predict(state.model.eval(), batch), batch)
        plain = run.plain.objective
        torch.testing.assert_close(judged, plain.losses(plain.predict(state.model, batch), batch))


@pytest.mark.parametrize(
    "name", ["attention.window", "attention.elsa", "attention.a3", "attention.dota", "attention.spatten"]
)
def test_plain_export_requires_export_plain(name: str) -> None:
    _, state = started(name)
    with pytest.raises(RefusedError, match="outputs would differ"):
        technique(name).finish(state.model)
    finished = technique(name, export_plain=True).finish(state.model)
    bare = plain_run().build()
    assert finished.state_dict().keys() == bare.state_dict().keys()
    bare.load_state_dict(finished.state_dict())
    torch.testing.assert_close(finished(text()), bare(text()))


def test_a_missing_phase_in_the_log_is_an_error() -> None:
    run, state = started("attention.elsa")
    run.verify(state)
    del state.log[-1]
    with pytest.raises(IntegrityError, match=r"attention\.elsa: after 4 steps"):
        run.verify(state)


def test_models_without_attention_are_refused() -> None:
    with pytest.raises(RefusedError, match="no self-attention was found in Linear"):
        find_attention_sites(nn.Linear(2, 2))
    places = find_attention_sites(tiny_vit())
    assert [place.causal for place in places] == [False] * 4
    assert all(place.plain is full_attention for place in places)


class TestModelsOfTransformers:
    @pytest.mark.parametrize("kind", ["gpt2", "llama", "llama-grouped"])
    @pytest.mark.parametrize("rows", ["plain", "padded"])
    def test_a_full_window_equals_the_attention_of_transformers(self, kind: str, rows: str) -> None:
        mask = torch.ones_like(TOKENS)
        if rows == "padded":
            mask[0, :4] = 0
        model = theirs(kind)
        expected = model(TOKENS, attention_mask=mask).logits
        technique("attention.window", window=64, block=8).model(model)
        actual = model(TOKENS, attention_mask=mask).logits
        torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-5)

    def test_a_narrow_window_hides_distant_tokens(self) -> None:
        model = technique("attention.window", window=2, block=4).model(theirs("llama"))
        changed = TOKENS.clone()
        changed[:, 0] += 1
        same = (model(changed).logits - model(TOKENS).logits).abs().amax((0, 2)) < 1e-6
        assert same.tolist() == [False] * 3 + [True] * 9  # two blocks reach one token further each

    @pytest.mark.parametrize("name", FIXED)
    def test_masks_that_show_later_tokens_are_refused(self, name: str) -> None:
        model, length = technique(name).model(theirs("llama")), TOKENS.shape[1]
        mask = torch.ones(len(TOKENS), 1, length, length, dtype=torch.bool).tril()
        model(TOKENS, attention_mask=mask)
        mask[..., :3, :3] = True
        with pytest.raises(RefusedError, match="hides later tokens, but LlamaAttention attends"):
            model(TOKENS, attention_mask=mask)

    def test_a_mask_of_all_layers_is_read_until_it_changes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, mask = technique("attention.window").model(theirs("llama")), torch.ones_like(TOKENS)
        mask[0, :4] = 0
        reads, triu = [], Tensor.triu
        monkeypatch.setattr(Tensor, "triu", lambda *args: reads.append(args) or triu(*args))
        model(TOKENS, attention_mask=mask)
        assert len(reads) == 1
        shared = torch.ones(4, 4, dtype=torch.bool).tril()
        assert hides_later_keys(shared)
        assert not hides_later_keys(shared.fill_(True))

    @pytest.mark.parametrize("kind", ["llama-grouped", "gpt2"])
    @pytest.mark.parametrize(
        "name",
        [f"attention.{each}" for each in ("elsa", "sanger", "block_sparse", "a3", "spatten", "dota", "tiled")],
    )
    def test_filters_calibrate_and_train_in_transformers(self, name: str, kind: str) -> None:
        plain = plain_run()
        changed = type(plain)(lambda: HuggingFaceCausalLM(theirs(kind)), plain.source, plain.objective)
        records, state = run_through(changed, with_optimizer([technique(name)]), 4)
        assert losses(records)[-1] < losses(records)[0]
        if name in CALIBRATED:
            assert len(state.log[-1].decision["found"]) == 2

    @pytest.mark.parametrize("name", ["attention.window", "attention.elsa", "attention.tiled"])
    def test_dropout_of_attention_is_applied(self, name: str) -> None:
        model = technique(name).model(theirs("gpt2")).train()
        for path, module in model.named_modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.5 * path.endswith("attn_dropout")
        first, second = (model(TOKENS).logits for _ in range(2))
        assert not torch.equal(first, second)

    def test_finishing_restores_their_own_attention(self) -> None:
        model = theirs("llama")
        expected = model(TOKENS).logits
        one = technique("attention.window", export_plain=True)
        torch.testing.assert_close(one.finish(one.model(model))(TOKENS).logits, expected)


def test_a_text_tower_causal_at_each_call_sees_no_future() -> None:
    shape = transformers.CLIPTextConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64,
        max_position_embeddings=16,
    )  # fmt: skip
    model = technique("attention.window", window=16).model(transformers.CLIPTextModel(shape).eval())
    tokens = torch.arange(9)[None] + 3
    changed = tokens.clone()
    changed[0, -1] = 60
    with torch.no_grad():
        before, after = (model(input_ids=each).last_hidden_state for each in (tokens, changed))
    assert torch.equal(before[:, :-1], after[:, :-1]) and not torch.equal(before[:, -1], after[:, -1])
