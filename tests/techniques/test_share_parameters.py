"""Parameter sharing compared with transformers' ALBERT and with copied blocks; factorized embeddings."""

import math
from itertools import pairwise

import pytest
import torch
import transformers
from adapter_models import TOKENS, next_token_loss, theirs
from stacked_models import KINDS
from tiny_runs import advance, plain_run, technique, tiny_model
from torch import nn

from thrifty.composition.compose import compose
from thrifty.composition.explain import explain
from thrifty.core.errors import IntegrityError, RefusedError
from thrifty.modeling.module_surgery import find_stacks, tied_names
from thrifty.models.families import assemble
from thrifty.models.model_config import ModelConfig
from thrifty.objectives.next_token import NextToken
from thrifty.techniques.memory.share_parameters import ShareParameters, first_of_group

IDS = TOKENS % 256


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_groups_have_nearly_equal_sizes() -> None:
    for depth in range(1, 14):
        for groups in range(1, depth + 1):
            firsts = [first_of_group(block, depth, groups) for block in range(depth)]
            starts = sorted(set(firsts))
            assert len(starts) == groups and all(firsts[start] == start for start in starts)
            assert firsts == sorted(firsts)
            sizes = [b - a for a, b in pairwise([*starts, depth])]
            assert max(sizes) - min(sizes) <= 1


def test_twelve_shared_blocks_match_albert() -> None:
    config = transformers.AlbertConfig(
        vocab_size=300, embedding_size=16, hidden_size=32, num_hidden_layers=12, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=64,
    )  # fmt: skip
    albert = transformers.AlbertModel(config)
    model = assemble(ModelConfig("bert", 12, 32, 4, 4, 64, 300, 64, True))
    ShareParameters(embedding=16).model(model)
    assert count(model.blocks) == count(albert.encoder.albert_layer_groups)
    # ALBERT's projection has a bias
    thin = model.embedding.token
    tables = count(albert.embeddings.word_embeddings) + count(albert.encoder.embedding_hidden_mapping_in) - 32
    assert thin.weight.numel() + thin.projection.numel() == tables


def test_shared_bert_base_has_12m_parameters() -> None:
    with torch.device("meta"):
        model = assemble(ModelConfig("bert", 12, 768, 12, 12, 3072, 30_000, 512, True))
    assert 108e6 < count(model) < 111e6
    thin = (30_000 + 512) * 128 + 128 * 768  # the paper's positions have the thin width too
    assert 11e6 < count(model.blocks[0]) + thin < 12e6


@pytest.mark.sampled(18)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", ["all", "attention", "feed_forward"])
def test_shared_gradient_is_the_sum_over_uses(kind: str, part: str) -> None:
    shared = ShareParameters(part=part).model(KINDS[kind].model())  # type: ignore[arg-type]
    tied = tied_names(shared)
    apart = KINDS[kind].model()
    values = dict(shared.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, parameter in apart.named_parameters(remove_duplicate=False):
            parameter.copy_(values[name])
    losses = [KINDS[kind].loss(model) for model in (shared, apart)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    blocks = {name: depth for name, depth in KINDS[kind].stacks.items() if depth > 1}
    gradients = {name: p.grad for name, p in apart.named_parameters(remove_duplicate=False)}
    checked = 0
    for first, parameter in shared.named_parameters():
        uses = [name for name, leader in tied.items() if leader == first and name.startswith(tuple(blocks))]
        if not uses or parameter.grad is None:
            continue
        total = gradients[first] + sum(gradients[name] for name in uses)
        torch.testing.assert_close(parameter.grad, total, rtol=1e-3, atol=1e-5)
        checked += 1
    assert checked >= 2


@pytest.mark.parametrize(("part", "inside"), [("attention", "attention."), ("feed_forward", "mlp.")])
def test_part_setting_shares_only_that_part(part: str, inside: str) -> None:
    model = ShareParameters(part=part, groups=2).model(tiny_model(depth=4))  # type: ignore[arg-type]
    tied = {name: first for name, first in tied_names(model).items() if name.startswith("blocks")}
    assert tied and all(inside in name and "norm" not in name for name in tied)
    assert {(name.split(".")[1], first.split(".")[1]) for name, first in tied.items()} == {("1", "0"), ("3", "2")}


def test_factorized_table_keeps_scale_and_tied_head() -> None:
    model = tiny_model()
    std = model.embedding.token.weight.std()
    ShareParameters(embedding=8).model(model)
    token = model.embedding.token
    assert token.weight.shape == (256, 8) and token.projection.shape == (8, 32)
    assert 0.8 < (token.weight @ token.projection).std() / std < 1.25
    assert model.head.weight is token.weight and model.head.projection is token.projection
    hidden = model(IDS)
    torch.testing.assert_close(model.head(hidden), hidden @ (token.weight @ token.projection).T)


def test_factorized_head_loss_is_exact_in_chunks() -> None:
    one = ShareParameters(embedding=8)
    model, plain = one.model(tiny_model()), plain_run()
    batch = plain.source.at(0)
    thin = one.objective(NextToken())
    prediction = thin.predict(model, batch)
    assert prediction.hidden is not None and prediction.hidden.shape[-1] == 8 and type(prediction.head) is nn.Linear
    found, wanted = thin.losses(prediction, batch), NextToken().losses(NextToken().predict(model, batch), batch)
    torch.testing.assert_close(found, wanted)
    gradients = []
    for losses in (found, wanted):
        model.zero_grad()
        (losses * batch.weight).sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_finish_unties_blocks_and_expands_tables(kind: str) -> None:
    if "vit" in kind:
        pytest.skip("no token embedding")
    one = ShareParameters(embedding=8)
    model = one.model(KINDS[kind].model()).eval()
    before = KINDS[kind].loss(model)
    plain = KINDS[kind].model().eval()
    plain.load_state_dict(one.finish(model).state_dict())
    torch.testing.assert_close(KINDS[kind].loss(plain), before, rtol=1e-4, atol=1e-5)
    assert tied_names(model) == tied_names(plain)


def test_report_counts_shared_parameters_once() -> None:
    run = compose(plain_run(), [ShareParameters(), technique("optimizers.adamw")], 4)
    plain = plain_run().build()
    block = count(plain.blocks[0])
    (row,) = [row for row in explain(run).rows if row.technique.name == "memory.share_parameters"]
    assert row.before.parameters - row.after.parameters == 4 * 3 * block
    assert row.before.gradients - row.after.gradients == 4 * 3 * block
    assert row.after.flops == row.before.flops


def test_blocks_stay_shared_during_training() -> None:
    run = compose(plain_run(), [ShareParameters(embedding=8), technique("optimizers.adamw")], 4)
    state = run.start()
    records = advance(run, state)
    assert all(math.isfinite(record.loss) for record in records)
    assert state.model is not None and state.optimizer is not None
    assert not any(name.startswith(("blocks.1", "blocks.2", "blocks.3", "head")) for name in state.optimizer.names)
    blocks = find_stacks(state.model)["blocks"]
    assert all(a is b for a, b in zip(blocks[0].parameters(), blocks[3].parameters(), strict=True))
    blocks[1].mlp.down.weight = nn.Parameter(blocks[1].mlp.down.weight.detach().clone())
    with pytest.raises(IntegrityError, match=r"blocks\.1\.mlp\.down\.weight is no longer"):
        run.verify(state)


def test_parameters_used_twice_are_shared_twice() -> None:
    chosen = [technique(name) for name in ("initializations.rezero", "memory.share_parameters", "optimizers.adamw")]
    state = compose(plain_run(), chosen, 4).start()
    assert state.model is not None
    gains = [p for name, p in state.model.named_parameters(remove_duplicate=False) if name.endswith("gain")]
    assert len(gains) == 8 and len({*gains}) == 1


def test_settings_that_save_nothing_are_refused() -> None:
    with pytest.raises(RefusedError, match="embedding=32 saves no parameters at width 32"):
        ShareParameters(embedding=32).model(tiny_model())
    with pytest.raises(RefusedError, match="2 blocks do not form 3 groups"):
        ShareParameters(groups=3).model(tiny_model(depth=2))


def test_hugging_face_models_learn_with_shared_blocks() -> None:
    model = ShareParameters(embedding=8).model(theirs("gpt2"))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(20):
        losses.append(next_token_loss(model(input_ids=TOKENS).logits, TOKENS))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 1
