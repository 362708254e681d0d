"""Progressive layer dropping: probabilities, factors, gates and refused models."""

from collections import Counter
from itertools import pairwise
from statistics import fmean

import pytest
import torch
import transformers
from tiny_runs import advance, assert_same, losses, plain_run, run_through, snapshot, technique, tiny_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from thrifty.composition.compose import compose
from thrifty.core.backward import Backward, plain_backward
from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.run_notes import collect_notes
from thrifty.modeling.module_surgery import find_blocks
from thrifty.models.hf_wrapper import HuggingFaceCausalLM
from thrifty.techniques.growth.layer_drop import LayerDrop, is_kept, keep_probability, theta_at

DROPPING = LayerDrop(time_constant=1, theta=0.5)


def kept_blocks(seed: int, step: int, blocks: int, theta: float = 0.5) -> list[bool]:
    return [is_kept(seed, step, "blocks", block, keep_probability(block, blocks, theta)) for block in range(blocks)]


def test_theta_falls_from_one_to_its_limit() -> None:
    actual = [theta_at(step, 0.5, 100) for step in range(2000)]
    assert actual[0] == 1.0 and actual == sorted(actual, reverse=True)
    assert actual[100] == pytest.approx(0.5 + 0.5 / torch.e) and actual[-1] == pytest.approx(0.5, abs=1e-8)


@pytest.mark.parametrize("blocks", [1, 4, 12])
def test_three_quarters_of_the_blocks_are_kept_in_the_long_run(blocks: int) -> None:
    expected = sum(keep_probability(block, blocks, 0.5) for block in range(blocks))
    assert expected == pytest.approx((3 * blocks - 1) / 4)
    actual = fmean(sum(kept_blocks(7, step, blocks)) for step in range(4000))
    assert actual == pytest.approx(expected, abs=4 * (blocks / 4 / 4000) ** 0.5)


def test_blocks_are_dropped_independently() -> None:
    pairs = Counter((kept_blocks(0, step, 2)[0], kept_blocks(0, step, 2)[1]) for step in range(4000))
    assert pairs[True, True] / 4000 == pytest.approx(0.75 * 0.5, abs=0.03)
    assert kept_blocks(0, 5, 12) == kept_blocks(0, 5, 12)
    assert [kept_blocks(0, step, 12) for step in range(5)] != [kept_blocks(1, step, 12) for step in range(5)]


def test_the_factor_compensates_dropping_unlike_published() -> None:
    steps, blocks = 6000, 12
    probabilities = [keep_probability(block, blocks, 0.5) for block in range(blocks)]
    kept = [
        fmean(is_kept(3, step, "blocks", block, p) for step in range(steps)) for block, p in enumerate(probabilities)
    ]
    right = [share / p for share, p in zip(kept, probabilities, strict=True)]
    published = [share / following for share, following in zip(kept, probabilities[1:], strict=False)]
    assert right == pytest.approx([1.0] * blocks, abs=0.05)
    assert max(p / following for p, following in pairwise(probabilities)) > 1.07
    assert fmean(published) > 1.03


def test_the_first_block_can_be_spared() -> None:
    assert [keep_probability(block, 4, 0.5, spare_first=True) for block in range(4)] == [1, 0.875, 0.75, 0.625]


def reference_output(model: nn.Module, tokens: Tensor, step: int) -> Tensor:
    """Compute the pre-norm model with the blocks that a step keeps, branch by branch."""
    blocks, theta = find_blocks(model)[1], theta_at(step, 0.5, 1)
    x = model.embedding(tokens)
    for index, block in enumerate(blocks):
        p = keep_probability(index, len(blocks), theta)
        if is_kept(0, step, "blocks", index, p):
            x = x + block.attention(block.attention_norm(x)) / p
            x = x + block.mlp(block.mlp_norm(x)) / p
    return model.norm(x)


@pytest.mark.parametrize("style", ["gpt", "llama"])
def test_a_step_equals_the_model_without_dropped_blocks(style: str) -> None:
    plain, source = tiny_model(style=style), plain_run().source
    model = DROPPING.model(tiny_model(style=style)).train()
    seen: list[Tensor] = []
    model.norm.register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    backward = DROPPING.backward(plain_backward)
    for step in range(5):
        batch = source.at(step)
        backward(model, plain_run().objective, batch)
        with torch.no_grad():
            expected = reference_output(plain, batch["tokens"][:, :-1], step)
        torch.testing.assert_close(seen[-1], expected, rtol=1e-5, atol=1e-5)


def counted(backward: Backward, model: nn.Module) -> list[int]:
    calls = [0] * 4
    for index, block in enumerate(find_blocks(model)[1]):
        block.mlp.down.register_forward_hook(lambda *_, index=index: calls.__setitem__(index, calls[index] + 1))
    for step in range(8):
        model.zero_grad()
        backward(model, plain_run().objective, plain_run().source.at(step))
        kept = [
            is_kept(0, step, "blocks", b, keep_probability(b, 4, theta_at(step, DROPPING.theta, 1))) for b in range(4)
        ]
        trained = [all(p.grad is not None for p in block.parameters()) for block in find_blocks(model)[1]]
        assert trained == kept
    return calls


def test_dropped_blocks_are_not_computed_and_have_no_gradient() -> None:
    calls = counted(DROPPING.backward(plain_backward), DROPPING.model(tiny_model()).train())
    expected = [
        sum(is_kept(0, s, "blocks", b, keep_probability(b, 4, theta_at(s, 0.5, 1))) for s in range(8)) for b in range(4)
    ]
    assert calls == expected and min(calls) < 8


def test_evaluation_is_bit_identical_to_the_whole_model() -> None:
    _, state = run_through(plain_run(), [DROPPING, technique("optimizers.adamw")], 6)
    plain, tokens = plain_run().build(), plain_run().source.at(9)["tokens"][:, :-1]
    assert state.model is not None
    plain.load_state_dict(state.model.state_dict())
    with torch.no_grad():
        assert torch.equal(state.model.eval()(tokens), plain.eval()(tokens))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("other", ["memory.recompute", "memory.optimal_recompute", "compile"])
def test_recomputed_blocks_have_the_same_gates(other: str) -> None:
    torch._dynamo.reset()
    plain, chosen = plain_run(style="gpt", dropout=0.3), [DROPPING, technique("optimizers.adamw")]
    one, state = run_through(plain, chosen, 6)
    again, same = run_through(plain, [*chosen, technique(other)], 6)
    assert losses(again) == losses(one)
    assert [record.notes["kept_blocks"] for record in one] == [record.notes["kept_blocks"] for record in again]
    assert min(record.notes["kept_blocks"] for record in one) < 4
    assert_same(snapshot(same), snapshot(state))


def test_all_micro_batches_of_a_step_have_the_same_gates() -> None:
    chosen = [DROPPING, technique("optimizers.adamw")]
    whole, _ = run_through(plain_run(), chosen, 6)
    parts, _ = run_through(plain_run(), [*chosen, technique("large_batch.gradient_accumulation")], 6)
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-4)


def test_resume_drops_the_same_blocks() -> None:
    run = compose(plain_run(), [DROPPING, technique("optimizers.adamw")], 8)
    state = run.start()
    notes = [record.notes["kept_blocks"] for record in advance(run, state)]
    assert notes == [
        sum(is_kept(0, s, "blocks", b, keep_probability(b, 4, theta_at(s, 0.5, 1))) for b in range(4)) for s in range(8)
    ]


@pytest.mark.parametrize("style", ["gpt1", "bert"])
def test_post_norm_models_are_refused(style: str) -> None:
    with pytest.raises(RefusedError, match="has a norm after its sums"):
        DROPPING.model(tiny_model(style=style))


THEIRS = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 60,
    "num_hidden_layers": 2, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "more"), [("Gemma2", {"head_dim": 8}), ("Olmo2", {}), ("Llama", {}), ("OPT", {"ffn_dim": 48})]
)
def test_blocks_with_a_norm_after_their_branches_are_refused(kind: str, more: dict[str, int]) -> None:
    """The norm would undo the factor. Blocks that require positions are tried with the inputs of the model."""
    model = HuggingFaceCausalLM(
        AutoModelForCausalLM.from_config(getattr(transformers, f"{kind}Config")(**THEIRS, **more))
    )
    if kind in ("Gemma2", "Olmo2"):
        with pytest.raises(RefusedError, match=r"has a norm after lm\.model\.layers\.0\.self_attn\.o_proj"):
            DROPPING.model(model)
        return
    with collect_notes() as notes:
        DROPPING.model(model)
    assert not any("could not be run" in text for text in notes)


@pytest.mark.parametrize("norm_first", [True, False])
def test_decoders_of_torch_are_tried(norm_first: bool) -> None:
    layer = nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=norm_first)
    model = nn.ModuleDict({"decoder": nn.TransformerDecoder(layer, 2)})
    with collect_notes() as notes:
        if norm_first:
            DROPPING.model(model)
        else:
            with pytest.raises(RefusedError, match="has a norm after its sums"):
                DROPPING.model(model)
    assert not any("could not be run" in text for text in notes)


def test_a_post_norm_model_with_positional_blocks_is_refused() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            return self.norm(x + self.down(self.up(x + positions).relu()))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.blocks = nn.Embedding(16, 8), nn.ModuleList([Block(), Block()])

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x, torch.zeros_like(x))
            return x

    with pytest.raises(RefusedError, match="has a norm after its sums"):
        DROPPING.model(Model())


@pytest.mark.parametrize("error", ["KeyError", "AssertionError"])
def test_block_trials_use_the_inputs_of_the_model(error: str) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

        def forward(self, x: Tensor, **given: Tensor) -> Tensor:
            assert error == "KeyError" or "places" in given
            return x + self.down(self.up(self.norm(x) + given["places"]).relu())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.blocks = nn.Embedding(16, 8), nn.ModuleList([Block(), Block()])

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x, places=torch.zeros_like(x))
            return x

    with collect_notes() as notes:
        DROPPING.model(Model())
    assert not any("could not be run" in text for text in notes)


def test_frozen_base_weights_are_refused() -> None:
    with pytest.raises(UsageError, match="would train no parameter"):
        compose(plain_run(), [DROPPING, technique("adapters.lora"), technique("optimizers.adamw")], 4)
    with pytest.raises(UsageError, match="a dropped block is not computed"):
        chosen = [DROPPING, technique("memory.activation_budget"), technique("optimizers.adamw")]
        compose(plain_run(), chosen, 4)
