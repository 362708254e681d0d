import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import FAMILIES, VOCABULARY

from thrifty.core.errors import UsageError
from thrifty.core.recipe import ModelSettings
from thrifty.models import build_model
from thrifty.models.text_generation import generate, sample_token, supports_kv_cache, use_kv_cache
from thrifty.models.weight_conversion import import_folder


def sharp_model(preset: str = "llama-nano", length: int = 64):
    """Return a model with random weights so large that rounding does not change the most likely token."""
    model = build_model(ModelSettings(preset=preset, depth=2, width=64), VOCABULARY, length, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1)
    return model


@torch.no_grad()
def read_again(model, tokens, count, context=None):
    """Return the greedy continuation with the whole context recomputed for each token."""
    model.eval()
    for _ in range(count):
        seen = tokens if context is None else tokens[:, -context:]
        tokens = torch.cat((tokens, model.logits(seen)[:, -1].argmax(-1, keepdim=True)), dim=1)
    return tokens


def test_cached_and_plain_generation_give_the_same_tokens(save, tokens):
    for name in ("gpt2", "llama-grouped", "llama-scaled"):
        model, _ = import_folder(save(FAMILIES[name]())[0])
        assert supports_kv_cache(model)
        assert torch.equal(generate(model, tokens, 30, greedy=True), read_again(model, tokens, 30)), name


@pytest.mark.parametrize("preset", ["gpt-nano", "llama-nano"])
@torch.no_grad()
def test_cached_logits_equal_uncached_ones(preset, tokens):
    cached, plain = sharp_model(preset), sharp_model(preset)
    with use_kv_cache(cached) as read:
        for length in range(10, 20):
            torch.testing.assert_close(read(tokens[:, :length]), plain.logits(tokens[:, :length])[:, -1])


def test_each_new_token_is_computed_once(tokens):
    model, lengths = sharp_model(), []
    model.embedding.register_forward_hook(lambda module, inputs, output: lengths.append(output.shape[1]))
    generate(model, tokens, 4)
    assert lengths == [24, 1, 1, 1]


@pytest.mark.parametrize("preset", ["gpt-nano", "llama-nano"])
def test_long_text_attends_to_the_newest_tokens(preset, tokens):
    model = sharp_model(preset, length=30)
    expected = read_again(model, tokens, 20, context=30)
    assert torch.equal(generate(model, tokens, 20, greedy=True, context=30), expected)
    longer = torch.cat((tokens, tokens), dim=1)
    assert torch.equal(generate(model, longer, 5, greedy=True, context=30), read_again(model, longer, 5, context=30))


@pytest.mark.parametrize("preset", ["gpt-nano", "llama-nano"])
def test_positions_limit_the_context_by_default(preset, tokens):
    model = sharp_model(preset, length=16)
    assert torch.equal(generate(model, tokens, 30, greedy=True), read_again(model, tokens, 30, context=16))


def test_the_model_is_restored_after_generation(tokens):
    model = sharp_model("gpt-nano").train()
    model.blocks[0].eval()
    before, cores = model.logits(tokens), [block.attention.core for block in model.blocks]
    generate(model, tokens, 3)
    assert torch.equal(model.logits(tokens), before)
    assert [block.attention.core for block in model.blocks] == cores
    assert model.training and not model.blocks[0].training and model.blocks[1].training


def test_the_model_is_restored_after_an_error(tokens):
    model = sharp_model("gpt-nano").train()
    cores = [block.attention.core for block in model.blocks]
    with pytest.raises(IndexError):
        generate(model, torch.full((1, 3), VOCABULARY), 2)
    assert model.training and [block.attention.core for block in model.blocks] == cores


def test_a_replaced_core_generates_without_cache(tokens):
    model = sharp_model()

    def uniform(q, k, v):
        t = q.shape[2]
        weight = torch.ones(t, t).tril() / torch.arange(1, t + 1)[:, None]
        return weight @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)

    for block in model.blocks:
        block.attention.core = uniform
    assert not supports_kv_cache(model)
    assert torch.equal(generate(model, tokens, 5, greedy=True), read_again(model, tokens, 5))


def test_a_wrapped_block_generates_without_cache():
    from thrifty.modeling.module_surgery import wrap_forward

    model = sharp_model()
    wrap_forward(model.blocks[0], lambda module, inner, x: inner(x.roll(1, dims=1)))
    assert not supports_kv_cache(model)


def test_the_seed_determines_the_text(tokens):
    model = build_model(ModelSettings(), VOCABULARY, 64, seed=0)
    first, same, other = (generate(model, tokens, 20, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, same) and not torch.equal(first, other)
    assert torch.equal(first[:, :24], tokens) and first.shape == (2, 44)


def test_top_k_of_one_and_a_cold_temperature_are_greedy(tokens):
    model = sharp_model()
    greedy = generate(model, tokens, 10, greedy=True)
    assert torch.equal(generate(model, tokens, 10, top_k=1), greedy)
    assert torch.equal(generate(model, tokens, 10, temperature=1e-4), greedy)
    assert torch.equal(generate(model, tokens, 10, top_p=1e-6), greedy)


@given(
    seed=st.integers(0, 1000),
    temperature=st.floats(0.1, 3),
    top_k=st.none() | st.integers(1, 12),
    top_p=st.none() | st.floats(0.01, 1),
)
def test_only_allowed_tokens_are_sampled(seed, temperature, top_k, top_p):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(4, 10, generator=generator)
    chosen = sample_token(logits, generator, temperature, top_k, top_p)
    for row, token in zip(logits / temperature, chosen, strict=True):
        likelier = row > row[token]
        assert top_k is None or likelier.sum() < top_k
        bound = -torch.inf if top_k is None else row.topk(min(top_k, 10)).values[-1]
        kept = row.masked_fill(row < bound, -torch.inf).softmax(-1)
        assert top_p is None or kept[likelier].sum() < top_p + 1e-5


def test_sampling_follows_the_probabilities():
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(20_000, 3)
    drawn = sample_token(logits, torch.Generator().manual_seed(0), 1.0, None, None)
    frequency = torch.bincount(drawn, minlength=3) / len(drawn)
    torch.testing.assert_close(frequency, torch.tensor([0.5, 0.3, 0.2]), rtol=0, atol=0.02)


def test_rows_end_at_the_stop_token(tokens):
    model = sharp_model()
    free = generate(model, tokens, 20, greedy=True)
    stop = int(free[0, 26])
    ended = generate(model, tokens, 20, greedy=True, stop=stop)
    first = int((free[0, 24:] == stop).nonzero()[0])
    assert (ended[0, 24 + first :] == stop).all()
    alone = generate(model, tokens[:1], 20, greedy=True, stop=stop)
    assert alone.shape[1] == 24 + first + 1


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        *(({"temperature": value}, f"temperature is {value}") for value in (0, 1e-300, math.inf, math.nan)),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
    ],
)
def test_impossible_choices_are_refused(choices, message, tokens):
    with pytest.raises(UsageError, match=message):
        generate(sharp_model(), tokens, 1, **choices)
    with pytest.raises(UsageError, match="nothing to continue"):
        generate(sharp_model(), tokens[:, :0], 1)
