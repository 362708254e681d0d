"""Bias-only training: biases, trained parameters, and models without biases."""

import pytest
import torch
import transformers
from adapter_models import TOKENS, theirs
from stacked_models import KINDS
from tiny_runs import advance, plain_run, technique, tiny_model

from thrifty.composition.compose import compose
from thrifty.core.errors import RefusedError
from thrifty.core.run_notes import collect_notes
from thrifty.techniques.adapters.bias_only import BiasOnly, bias_names


def test_biases_of_layers_and_norms_are_trained_and_nothing_else() -> None:
    model = BiasOnly().model(theirs("gpt2"))
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == name.endswith(".bias")
    assert sum(p.requires_grad for p in model.parameters()) == 2 * 6 + 1  # 4 layers and 2 norms a block, the last norm


def test_relative_position_tables_are_not_biases() -> None:
    assert {name for name in bias_names(KINDS["torch's encoder"].model()) if "in_proj" in name}
    assert not any("relative_attention_bias" in name for name in bias_names(KINDS["t5"].model()))


def test_the_head_is_trained_on_request() -> None:
    model = BiasOnly(head=True).model(tiny_model(style="gpt", tied=False))
    assert model.head.weight.requires_grad and not model.embedding.token.weight.requires_grad


def test_a_model_without_biases_is_refused_or_extended() -> None:
    with pytest.raises(RefusedError, match="has no biases to train") as refused:
        BiasOnly().model(tiny_model())
    assert "adapters.bias_only.add=true" in refused.value.fix
    model = BiasOnly(add=True).model(tiny_model(depth=2))
    tokens = TOKENS % 256
    assert torch.equal(model(tokens), tiny_model(depth=2)(tokens))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained == [f"blocks.{i}.{layer}.added_bias" for i in (0, 1) for layer in
                       ("attention.qkv", "attention.out", "mlp.up", "mlp.down")]  # fmt: skip
    with torch.no_grad():
        model.blocks[1].mlp.down.added_bias.fill_(1.0)
    assert (model(tokens) - tiny_model(depth=2)(tokens)).abs().max() > 0.1


def test_the_trained_model_has_the_plain_architecture() -> None:
    one = BiasOnly()
    run = compose(plain_run(style="gpt"), [one, technique("optimizers.adamw")], 4)
    state = run.start()
    advance(run, state)
    assert state.model is not None
    plain = plain_run(style="gpt").build()
    plain.load_state_dict(one.finish(state.model).state_dict())
    assert torch.equal(plain(TOKENS % 256), state.model(TOKENS % 256))
    moved = [n for (n, p), q in zip(plain.named_parameters(), plain_run(style="gpt").build().parameters(), strict=True)
             if not torch.equal(p, q)]  # fmt: skip
    assert moved and all(name.endswith("bias") for name in moved)


def test_biases_are_added_to_known_layers_only() -> None:
    """A router of experts has a matrix and returns several results."""
    config = transformers.MixtralConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    before = model(input_ids=TOKENS).logits
    with collect_notes() as notes:
        model = BiasOnly(add=True).model(model)
    assert torch.equal(model(input_ids=TOKENS).logits, before)
    assert "biases added to 8 layers; not to MixtralTopKRouter, whose computation is unknown" in notes
