"""Prefix tuning against its paper and against peft."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from adapter_models import CONFIGS, LENGTH, TOKENS, next_token_loss, ours, theirs
from drawn_models import Attention as OddAttention
from drawn_models import OddDecoder
from tiny_runs import advance, plain_run, run_through, technique, tiny_model
from torch import nn

import thrifty
from thrifty.composition.compose import compose
from thrifty.core.errors import RefusedError, UsageError
from thrifty.kernels.tiled_attention import causal_attention_reference, tiled_attention
from thrifty.models.attention_layers import full_attention
from thrifty.models.families import assemble
from thrifty.models.hf_wrapper import HuggingFaceCausalLM
from thrifty.models.model_config import ModelConfig
from thrifty.models.transformer import initialize
from thrifty.peft_format import save_adapter
from thrifty.techniques.adapters.prefix_tuning import (
    PrefixTuning,
    attend_with_prefix,
    body_of,
    collapse,
    keys_and_values,
    prefix_of,
)
from thrifty.techniques.adapters.prompt_tuning import PromptTuning
from thrifty.techniques.memory.recompute import Recompute

COUNT, HIDDEN = 5, 16


def peft_model(model: Any, hidden: int) -> Any:
    network = {"prefix_projection": True, "encoder_hidden_size": hidden} if hidden else {}
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=COUNT, **network)
    return peft.get_peft_model(model, config).eval()


@torch.no_grad()
def copy_from_peft(model: nn.Module, encoder: Any, order: Sequence[int] = ()) -> dict[str, tuple[torch.Tensor, ...]]:
    """Copy the values of peft's encoder into our model; return our parameters for each parameter of the encoder.

    `order` lists the blocks in peft's order if it differs from the model's.
    """
    pairs: dict[str, list[torch.Tensor]] = {}
    named = dict(model.named_parameters())
    last_words = {
        "embedding.weight": ("prefix", "prefix_table"),
        "transform.0.weight": ("prefix_in",),
        "transform.0.bias": ("prefix_in_bias",),
        "transform.2.weight": ("prefix_out",),
        "transform.2.bias": ("prefix_out_bias",),
    }
    for name, parameter in encoder.named_parameters():
        dim = 1 if name == "embedding.weight" else 0
        pairs[name] = [own for path, own in named.items() if path.rpartition(".")[2] in last_words[name]]
        if order and len(pairs[name]) == len(order):
            pairs[name] = [pairs[name][block] for block in order]
        for own, value in zip(pairs[name], parameter.chunk(len(pairs[name]), dim), strict=True):
            own.copy_(value)
    return {name: tuple(own) for name, own in pairs.items()}


@pytest.mark.parametrize("hidden", [0, HIDDEN])
@pytest.mark.parametrize("kind", CONFIGS)
def test_outputs_and_gradients_equal_peft(kind: str, hidden: int, tmp_path: Path) -> None:
    expected_model = peft_model(theirs(kind), hidden)
    encoder = expected_model.prompt_encoder["default"]
    expected = expected_model(input_ids=TOKENS).logits
    next_token_loss(expected, TOKENS).backward()
    for model in (theirs(kind), HuggingFaceCausalLM(theirs(kind)), ours(kind, tmp_path)):
        model = PrefixTuning(tokens=COUNT, hidden=hidden).model(model).eval()
        pairs = copy_from_peft(model, encoder)
        actual = model.logits(TOKENS) if hasattr(model, "task") else model(input_ids=TOKENS).logits
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-5)
        next_token_loss(actual, TOKENS).backward()
        for name, parameter in encoder.named_parameters():
            gradient = torch.cat([own.grad for own in pairs[name]], 1 if name == "embedding.weight" else 0)
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", CONFIGS)
def test_masks_include_the_prefix_as_in_peft(kind: str) -> None:
    keep = torch.ones_like(TOKENS)
    keep[0, :4] = 0
    labels = TOKENS.masked_fill(keep == 0, -100)
    expected_model = peft_model(theirs(kind), 0)
    model = PrefixTuning(tokens=COUNT, hidden=0).model(theirs(kind))
    copy_from_peft(model, expected_model.prompt_encoder["default"])
    expected = expected_model(input_ids=TOKENS, attention_mask=keep, labels=labels).loss
    positions = torch.arange(TOKENS.shape[1]).expand(2, -1)
    for more in ({}, {"position_ids": positions}):
        actual = model(input_ids=TOKENS, attention_mask=keep, labels=labels, **more).loss
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def encoder_or_encoder_decoder(kind: str) -> Any:
    """Return a tiny encoder or encoder-decoder of transformers in eval mode, equal at every call."""
    sizes = {"vocab_size": 300, "initializer_range": 0.2}
    bart = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": LENGTH}
    bert = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    t5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "t5":
            return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=300, **t5)).eval()
        if kind == "bart":
            bart_like = transformers.BartConfig(**sizes, **bart, **heads, init_std=0.2)
            return transformers.BartForConditionalGeneration(bart_like).eval()
        config = transformers.AutoConfig.for_model(kind, **sizes, **bert, max_position_embeddings=LENGTH)
        return transformers.AutoModel.from_config(config).eval()


@pytest.mark.parametrize("hidden", [0, HIDDEN])
@pytest.mark.parametrize("kind", ["bert", "roberta", "t5", "bart"])
def test_encoders_and_encoder_decoders_equal_peft(kind: str, hidden: int) -> None:
    """Outputs and gradients are equal, with masks; an encoder-decoder has prefixes in the decoder's self-attention.

    In peft 0.21, block i of three uses prefix 2i mod 3; for an even number of blocks it omits half of the prefixes.
    """
    two_sided = kind in ("t5", "bart")
    network = {"prefix_projection": True, "encoder_hidden_size": hidden} if hidden else {}
    task = "SEQ_2_SEQ_LM" if two_sided else "FEATURE_EXTRACTION"
    config = peft.PrefixTuningConfig(task_type=task, num_virtual_tokens=COUNT, **network)
    if two_sided:
        config.num_layers = 3  # peft takes the encoder's depth for both
    keep = torch.ones_like(TOKENS)
    keep[0, 9:] = 0
    later = {"decoder_input_ids": TOKENS[:, 3:9], "decoder_attention_mask": keep[:, 5:11]} if two_sided else {}
    inputs = {"input_ids": TOKENS + 2, "attention_mask": keep} | later
    expected_model = peft.get_peft_model(encoder_or_encoder_decoder(kind), config).eval()
    encoder = expected_model.prompt_encoder["default"]
    expected = expected_model(**inputs)[0]
    expected.square().mean().backward()
    model = PrefixTuning(tokens=COUNT, hidden=hidden).model(encoder_or_encoder_decoder(kind)).eval()
    pairs = copy_from_peft(model, encoder, [0, 2, 1] if two_sided else ())
    actual = model(**inputs)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-5)
    assert not torch.allclose(actual, encoder_or_encoder_decoder(kind)(**inputs)[0], atol=1e-2)
    actual.square().mean().backward()
    for name, parameter in encoder.named_parameters():
        gradient = torch.cat([own.grad for own in pairs[name]], 1 if name == "embedding.weight" else 0)
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=1e-6)


def test_the_decoder_of_an_image_text_model_gets_a_prefix() -> None:
    """The model has two stacks and no cross-attention."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    torch.manual_seed(0)
    tower = transformers.CLIPVisionConfig(**sizes, image_size=16, patch_size=8)
    text = transformers.LlamaConfig(**sizes, vocab_size=300)
    config = transformers.LlavaConfig(vision_config=tower, text_config=text, image_token_index=299)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    before = model(input_ids=TOKENS).logits
    model = PrefixTuning(tokens=3, hidden=0).model(model)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == [
        f"model.language_model.layers.{block}.prefix" for block in range(2)
    ]
    actual = model(input_ids=TOKENS).logits
    assert actual.shape == before.shape and not torch.allclose(actual, before, atol=1e-3)


@pytest.mark.parametrize("kind", ["bert", "t5", "bart"])
def test_encoders_and_encoder_decoders_support_recompute(kind: str) -> None:
    gradients, texts = [], (TOKENS, TOKENS[:, :5]) if kind != "bert" else (TOKENS,)
    for again in (False, True):
        model = PrefixTuning(tokens=4, hidden=8).model(encoder_or_encoder_decoder(kind))
        model = Recompute().model(model) if again else model
        model(*texts[:1], **({"decoder_input_ids": texts[1]} if texts[1:] else {}))[0].square().mean().backward()
        gradients.append(body_of(model).prefix_in.grad)
    assert gradients[0].any() and torch.equal(*gradients)


def test_a_model_with_its_own_checkpointing_is_refused() -> None:
    """The model would ignore its cache, and with it the prefix."""
    model = PrefixTuning(tokens=3).model(theirs("gpt2"))
    model.gradient_checkpointing_enable()
    model.eval()(input_ids=TOKENS)
    with pytest.raises(UsageError, match="uses its own gradient checkpointing"):
        model.train()(input_ids=TOKENS)


def without_cache(kind: str) -> tuple[nn.Module, torch.Tensor]:
    """Return a model whose attention has no cache of keys and values, equal at every call, and its input."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    if kind == "vit":
        images = torch.randn(2, 3, 16, 16)
        return transformers.ViTModel(transformers.ViTConfig(image_size=16, patch_size=4, **sizes)).eval(), images
    if kind == "distilbert":
        config = transformers.DistilBertConfig(vocab_size=300, dim=32, n_layers=2, n_heads=4)
        return transformers.DistilBertModel(config).eval(), TOKENS
    if kind == "torch":
        layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), torch.randn(2, 7, 32)
    return OddDecoder(alibi=kind == "alibi").eval(), TOKENS % 64


@pytest.mark.parametrize("kind", ["vit", "distilbert", "torch", "decoder", "alibi"])
def test_a_model_without_a_cache_has_a_prefix_in_each_attention(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The outputs equal those of the plain model whose calls of torch's attention get the same keys and values."""
    model, inputs = without_cache(kind)
    model = PrefixTuning(tokens=COUNT, hidden=0).model(model)
    prefixes = [module.prefix for module in model.modules() if hasattr(module, "prefix")]
    actual = model(inputs)
    used = iter(prefixes)

    def by_hand(q: Any, k: Any, v: Any, attn_mask: Any = None, *_: float, is_causal: bool = False, **more: Any) -> Any:
        keys, values = (x.expand(len(q), -1, -1, -1) for x in keys_and_values(next(used), 4))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if is_causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
        if attn_mask is not None:
            scores = scores + attn_mask
        scores = torch.cat((q @ keys.mT / q.shape[-1] ** 0.5, scores), -1)
        return scores.softmax(-1) @ torch.cat((values, v), 2)

    monkeypatch.setattr(F, "scaled_dot_product_attention", by_hand)
    monkeypatch.setattr(torch.backends.mha, "get_fastpath_enabled", lambda: False)
    expected = without_cache(kind)[0](inputs)
    for one, other in zip(*(x if isinstance(x, torch.Tensor) else x[0] for x in (actual, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert next(used, None) is None
    (actual if isinstance(actual, torch.Tensor) else actual[0]).square().mean().backward()
    assert all(prefix.grad is not None and prefix.grad.any() for prefix in prefixes)


def test_peft_stores_prefixes_of_decoders_alone(tmp_path: Path) -> None:
    for model in (encoder_or_encoder_decoder("t5"), without_cache("vit")[0], without_cache("decoder")[0]):
        with pytest.raises(RefusedError, match="prefixes for the blocks of a decoder"):
            save_adapter(PrefixTuning(tokens=3, hidden=0).model(model), tmp_path / "adapter")


def test_a_call_with_cached_keys_is_refused() -> None:
    class Cached(OddAttention):
        def forward(self, x: torch.Tensor, past: torch.Tensor | None = None) -> torch.Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            k, v = (k, v) if past is None else (torch.cat((past, k), 2), torch.cat((past, v), 2))
            return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=past is None).transpose(1, 2).flatten(2))

    model = OddDecoder(depth=2)
    model.blocks[0].attention = Cached(32, 4)  # type: ignore[union-attr]
    model = PrefixTuning(tokens=2, hidden=0).model(model)
    model(TOKENS % 64)
    with pytest.raises(UsageError, match="left out its prefix"):
        model.blocks[0].attention(torch.randn(1, 1, 32), torch.randn(1, 4, 3, 8))  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("core", [causal_attention_reference, tiled_attention])
def test_a_causal_core_attends_to_prefix_and_past(core: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 6, 8, generator=generator) for heads in (4, 2, 2))
    prefix = torch.randn(3, 2 * 2 * 8, generator=generator)
    keys, values = (x.expand(2, -1, -1, -1) for x in keys_and_values(prefix, 2))
    mask = torch.ones(6, 9, dtype=torch.bool).tril(3)
    expected = full_attention(q, torch.cat((keys, k), 2), torch.cat((values, v), 2), mask)
    torch.testing.assert_close(attend_with_prefix(core, prefix, q, k, v), expected)


def test_a_mask_leaves_the_prefix_visible() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 6, 8, generator=generator) for _ in range(3))
    prefix = torch.randn(3, 2 * 4 * 8, generator=generator)
    keep = torch.ones(2, 1, 1, 6, dtype=torch.bool)
    keep[0, ..., 4:] = False
    actual = attend_with_prefix(full_attention, prefix, q, k, v, keep)
    expected = attend_with_prefix(full_attention, prefix, q[:1], k[:1, :, :4], v[:1, :, :4])
    torch.testing.assert_close(actual[:1], expected)
    scores = torch.zeros(1, 4, 6, 6).masked_fill(~keep[:1], -torch.inf)
    torch.testing.assert_close(attend_with_prefix(full_attention, prefix, q[:1], k[:1], v[:1], scores), expected)


@pytest.mark.parametrize("style", ["bert", "t5", "marian"])
def test_every_attention_of_our_models_gets_a_prefix(style: str) -> None:
    model = assemble(ModelConfig(style, 2, 32, 4, 4, 64, 300, 32, True))  # type: ignore[arg-type]
    initialize(model, 0)
    inputs = (TOKENS,) if style == "bert" else (TOKENS, TOKENS[:, :5])
    before = model.eval().logits(*inputs)
    model = PrefixTuning(tokens=3, hidden=0).model(model)
    assert len([n for n, p in model.named_parameters() if p.requires_grad]) == (2 if style == "bert" else 6)
    actual = model.logits(*inputs)
    assert actual.shape == before.shape and (actual - before).abs().max() > 1e-3
    actual.square().mean().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters() if p.requires_grad)


def test_collapse_keeps_the_prefixes_of_the_network() -> None:
    model = PrefixTuning(tokens=4, hidden=8).model(tiny_model(depth=2)).eval()
    before = model(TOKENS % 256)
    made = [prefix_of(block.attention, body_of(model)) for block in model.blocks]
    collapse(model)
    torch.testing.assert_close(model(TOKENS % 256), before, rtol=0, atol=0)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert names == [f"blocks.{index}.attention.prefix" for index in (0, 1)]
    assert all(torch.equal(block.attention.prefix, value) for block, value in zip(model.blocks, made, strict=True))


@pytest.mark.parametrize("build", [lambda: tiny_model(depth=2), lambda: HuggingFaceCausalLM(theirs("gpt2"))])
def test_gradients_are_equal_with_recompute(build: Any) -> None:
    gradients = []
    for again in (False, True):
        model = PrefixTuning(tokens=4, hidden=8).model(build())
        model = Recompute().model(model) if again else model
        next_token_loss(model.logits(TOKENS % 256), TOKENS % 256).backward()
        gradients.append(body_of(model).prefix_in.grad)
    assert gradients[0].any() and torch.equal(*gradients)


@pytest.mark.parametrize("style", ["llama", "gpt"])
def test_only_the_prefix_is_trained(style: str) -> None:
    run = compose(plain_run(style=style), [technique("adapters.prefix_tuning"), technique("optimizers.adamw")], 4)
    state = run.start()
    advance(run, state)
    assert state.model is not None and state.optimizer is not None
    assert all("prefix" in name for name in state.optimizer.names)
    trained = dict(state.model.named_parameters())
    assert all(torch.equal(trained[name], value) for name, value in plain_run(style=style).build().named_parameters())


@pytest.mark.parametrize("kind", ["falcon", "gpt_bigcode", "gemma2"])
def test_key_value_heads_follow_the_cache_of_the_model(kind: str) -> None:
    """Some models share one head among all queries, against their config, or have heads of another width."""
    sizes = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    more: dict[str, Any] = {"gemma2": {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48}}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **sizes, **more.get(kind, {}))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    plain, random = model(input_ids=TOKENS).logits, torch.get_rng_state()
    model = PrefixTuning(tokens=3, hidden=0).model(model)
    assert torch.equal(torch.get_rng_state(), random)
    actual = model(input_ids=TOKENS).logits
    assert actual.shape == plain.shape and not torch.allclose(actual, plain, atol=1e-3)
    next_token_loss(actual, TOKENS).backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 2 and all(p.grad is not None and p.grad.abs().max() > 0 for p in trained)


def test_unsupported_inputs_are_refused() -> None:
    model = PrefixTuning(tokens=2).model(theirs("gpt2"))
    with pytest.raises(UsageError, match="'2' virtual tokens and '63' text tokens exceed the 64 positions"):
        model(input_ids=torch.zeros(1, LENGTH - 1, dtype=torch.long))
    cache = transformers.DynamicCache()
    cache.update(torch.zeros(2, 4, 3, 8), torch.zeros(2, 4, 3, 8), 0)
    with pytest.raises(UsageError, match="cannot continue from a cache"):
        model(input_ids=TOKENS, past_key_values=cache)
    with pytest.raises(UsageError, match="cannot continue from a cache"):
        model.generate(TOKENS, max_new_tokens=2)  # it would see one token at a time
    assert model.generate(TOKENS, max_new_tokens=2, use_cache=False).shape == (2, TOKENS.shape[1] + 2)


@pytest.fixture(scope="module")
def reader() -> dict[str, torch.Tensor]:
    """Weights of a tiny model trained on some of the standard library's text."""
    _, state = run_through(plain_run(batch=8), [technique("optimizers.adamw")], 200)
    assert state.model is not None
    return state.model.state_dict()


def loss_of_continuation(model: nn.Module, seed: int, rate: float, steps: int) -> float:
    """Train the model to continue any 6 bytes of text with the same 8 letters; return the loss of the letters."""
    letters = torch.randint(97, 123, (8,), generator=torch.Generator().manual_seed(seed))
    source = plain_run(batch=8).source
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], rate)

    def loss(step: int) -> torch.Tensor:
        tokens = torch.cat((source.at(step)["tokens"][:, :6], letters.expand(8, -1)), 1)
        return F.cross_entropy(model.logits(tokens[:, :-1])[:, 5:].flatten(0, 1), tokens[:, 6:].flatten())

    for step in range(steps):
        loss(1000 + step).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return sum(float(loss(5000 + step)) for step in range(5)) / 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_prefix_learns_what_an_equally_long_prompt_does_not(reader: dict[str, torch.Tensor], seed: int) -> None:
    actual = {}
    choices = {
        "prefix": PrefixTuning(tokens=4, hidden=0, seed=seed),
        "network": PrefixTuning(tokens=4, seed=seed),
        "prompt": PromptTuning(tokens=4, seed=seed),
    }
    rates = {"prefix": 0.1, "network": 1e-3, "prompt": 0.1}  # near the best of each
    for name, adapter in choices.items():
        model = tiny_model()
        model.load_state_dict(reader)
        actual[name] = loss_of_continuation(adapter.model(model), seed, rates[name], 60)
    assert actual["prefix"] < actual["prompt"] - 1 and actual["network"] < actual["prompt"] - 1


def test_packed_rows_are_refused_with_a_fix() -> None:
    model = technique("adapters.prefix_tuning").model(tiny_model(style="gpt"))
    with pytest.raises(UsageError, match="virtual tokens need one text per row") as refused:
        model(torch.zeros(1, 4, dtype=torch.long), torch.tensor([[1, 1, 2, 2]]))
    assert refused.value.fix == "--set objective.packed=false"


@pytest.mark.parametrize("kind", ["opt", "gpt2"])
def test_cache_shapes_of_a_model_in_training_mode(kind: str) -> None:
    """Shapes are found if the model skips or recomputes blocks, or returns tuples."""
    torch.manual_seed(0)
    if kind == "opt":
        sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 4}
        config = transformers.OPTConfig(vocab_size=300, num_attention_heads=4, layerdrop=0.9, **sizes)
    else:
        config = transformers.GPT2Config(vocab_size=300, n_embd=32, n_layer=4, n_head=4, return_dict=False)
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    if kind == "gpt2":
        model.gradient_checkpointing_enable()
    model.base_model.get_input_embeddings().eval()
    modes = [module.training for module in model.modules()]
    model = PrefixTuning(tokens=3, hidden=0).model(model)
    assert sum(hasattr(module, "prefix") for module in model.modules()) == 4
    assert [module.training for module in model.modules()] == modes


def test_a_core_that_would_drop_the_prefix_is_refused() -> None:
    """In a user's own loop, the order of techniques is the user's."""
    model = PrefixTuning(tokens=2, hidden=0).model(OddDecoder())
    with pytest.raises(RefusedError, match="which another technique, such as a prefix, has changed"):
        technique("attention.window", from_step=0).model(model)
    model = OddDecoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    thrifty.apply((model, optimizer), technique("attention.window", from_step=1))
    thrifty.apply(model, "prefix_tuning", tokens=2, hidden=0)
    model(TOKENS % 64).mean().backward()
    optimizer.step()
    with pytest.raises(RefusedError, match="which another technique, such as a prefix, has changed"):
        model(TOKENS % 64)


def test_a_prefix_after_a_window_keeps_both() -> None:
    model = technique("attention.window", from_step=0).model(OddDecoder())
    before = model(TOKENS % 64)
    model = PrefixTuning(tokens=2, hidden=0).model(model)
    assert not torch.allclose(model(TOKENS % 64), before, atol=1e-3)


def test_prepended_queries_do_not_see_the_text() -> None:
    seen: list[Any] = []

    def core(*call: Any) -> torch.Tensor:
        seen.extend(call)
        return call[0]

    x, past = torch.randn(1, 2, 4, 8), torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    assert attend_with_prefix(core, torch.randn(3, 32), x, x, x, past).shape == x.shape
    assert torch.equal(seen[3], torch.ones(1, 1, 7, 7, dtype=torch.bool).tril())
