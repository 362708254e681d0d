"""Encoders without mask tokens: equal to references of transformers and loops, exported, and trained on ranks."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.allocator_trace import measure_allocations
from drawn_models import Encoder as OwnEncoder
from drawn_models import built
from hypothesis import given
from hypothesis import strategies as some
from masked_work import ALONG, SETTINGS, double, trained_along
from rank_processes import on_ranks
from technique_runs import masked_run
from tiny_runs import VOCABULARY, corpus, losses, plain_run, run_through, technique, tiny_model, with_optimizer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from thrifty.composition.compose import BaseRun, compose
from thrifty.composition.explain import count, explain
from thrifty.core.batches import Batch
from thrifty.core.errors import RefusedError, UsageError
from thrifty.data.text.token_windows import PackedTokens
from thrifty.kernels.token_gather import gather_tokens, scatter_tokens
from thrifty.modeling.module_surgery import find_stacks
from thrifty.modeling.visible_tokens import prepare, visible_tokens_only
from thrifty.models.families import assemble
from thrifty.models.model_config import ModelConfig
from thrifty.models.transformer import Encoder, initialize
from thrifty.models.weight_conversion import export_folder, import_folder
from thrifty.objectives.masked_token import MaskedToken
from thrifty.techniques.data_selection.drop_masked_tokens import DecoderCrossAttention, DropMaskedTokens

transformers = pytest.importorskip("transformers")

SHAPE = ModelConfig("bert", 3, 32, 4, 4, 48, VOCABULARY, 40, tied=True, norm_eps=1e-12)
OBJECTIVE = MaskedToken(rate=0.5, mask=0, vocabulary=VOCABULARY, special=frozenset({0}))
ATTEND = ["self", "cross"]


def encoder(tied: bool = True) -> Encoder:
    model = assemble(replace(SHAPE, tied=tied))
    initialize(model, 0, std=0.2)
    assert isinstance(model, Encoder)
    with torch.no_grad():  # norms and biases unlike their initial values
        for name, values in model.named_parameters():
            if values.ndim == 1:
                values += 0.1 * torch.randn(values.shape, generator=torch.Generator().manual_seed(len(name)))
    return model


def with_decoder(model: nn.Module | None = None, **chosen: object) -> tuple[nn.Module, MaskedToken]:
    dropping = DropMaskedTokens(**chosen)  # type: ignore[arg-type]
    return dropping.model(model or encoder()), dropping.objective(OBJECTIVE)  # type: ignore[return-value]


def batch(length: int = 24, rows: int = 3, step: int = 0, objective: MaskedToken = OBJECTIVE) -> Batch:
    return objective.examples(PackedTokens(corpus(), length, rows, seed=1).at(step))


@given(length=some.integers(1, 12), data=some.data())
def test_states_return_to_their_positions_among_masks(length: int, data: some.DataObject) -> None:
    kept = data.draw(some.integers(0, length))
    places = [sorted(data.draw(some.permutations(range(length)))[:kept]) for _ in range(2)]
    visible = torch.tensor(places, dtype=torch.int64).view(2, kept)
    states, absent = torch.randn(2, kept, 3), torch.randn(1, length, 3)
    text = scatter_tokens(states, visible, absent, length)
    assert torch.equal(gather_tokens(text, visible), states)
    for row in range(2):
        for place in range(length):
            expected = states[row, places[row].index(place)] if place in places[row] else absent[0, place]
            assert torch.equal(text[row, place], expected)


def test_the_encoder_reads_tokens_at_their_own_positions() -> None:
    model, rows = encoder(), batch()
    order = torch.randperm(rows["visible"].shape[1], generator=torch.Generator().manual_seed(0))
    visible = rows["visible"]
    tokens = rows["tokens"].gather(1, visible)
    with torch.no_grad():
        states, shuffled = model(tokens, positions=visible), model(tokens[:, order], positions=visible[:, order])
        counted_anew = model(tokens)
        whole = model(rows["tokens"], positions=torch.arange(24).expand(3, -1))
        assert torch.equal(whole, model(rows["tokens"]))
    torch.testing.assert_close(shuffled, states[:, order], rtol=1e-5, atol=1e-5)
    assert (counted_anew - states).abs().max() > 1e-2


@pytest.mark.parametrize("blocks", [1, 2])
def test_predictions_equal_two_joined_models_of_transformers(blocks: int, tmp_path: Path) -> None:
    """A reference of two BERTs. One reads the visible tokens; the other processes the states and masks in a loop."""
    model, objective = with_decoder(blocks=blocks)
    rows = batch()
    reader, filler = (as_transformers(model, stack, tmp_path) for stack in ("blocks", "mask_decoder.blocks"))
    visible, places = rows["visible"], rows["places"]
    with torch.no_grad():
        states = reader.bert(input_ids=rows["tokens"].gather(1, visible), position_ids=visible).last_hidden_state
        embeddings, text = reader.bert.embeddings, torch.empty(3, 24, 32)
        for place in range(24):
            vectors = model.mask_decoder.mask + embeddings.position_embeddings.weight[place]
            text[:, place] = embeddings.LayerNorm(vectors + embeddings.token_type_embeddings.weight[0])
        for row in range(3):
            for number, place in enumerate(visible[row].tolist()):
                text[row, place] = states[row, number]
        logits = filler.cls(filler.bert.encoder(text).last_hidden_state)
        prediction = objective.predict(model, rows)
        for row in range(3):
            expected = logits[row, places[row]]
            torch.testing.assert_close(prediction.logits[row], expected, rtol=1e-5, atol=1e-5)
            loss = cross_entropy(expected, rows["targets"][row])
            torch.testing.assert_close(objective.losses(prediction, rows)[row], loss, rtol=1e-5, atol=1e-6)


def as_transformers(model: nn.Module, stack: str, folder: Path) -> nn.Module:
    """Return a BertForMaskedLM with the blocks of one of the model's stacks."""
    plain = assemble(replace(SHAPE, depth=len(model.get_submodule(stack))))
    values = dict(model.named_parameters())
    taken = {name: values[name.replace("blocks", stack)] for name, _ in plain.named_parameters()}
    plain.load_state_dict({name: value.detach() for name, value in taken.items()}, strict=False)
    export_folder(plain, replace(SHAPE, depth=len(plain.blocks)), folder / stack)
    return transformers.BertForMaskedLM.from_pretrained(folder / stack, attn_implementation="eager").eval()


def test_cross_attention_equals_torch() -> None:
    ours = DecoderCrossAttention(encoder().blocks[0].attention, "key")
    theirs = nn.MultiheadAttention(32, 4, batch_first=True)
    with torch.no_grad():
        for layer in (ours.q, ours.kv, ours.out):
            layer.bias.normal_()
        theirs.in_proj_weight.copy_(torch.cat((ours.q.weight, ours.kv.weight)))
        theirs.in_proj_bias.copy_(torch.cat((ours.q.bias, ours.kv.bias)))
        theirs.out_proj.weight.copy_(ours.out.weight)
        theirs.out_proj.bias.copy_(ours.out.bias)
    x, memory = torch.randn(2, 5, 32), torch.randn(2, 7, 32)
    torch.testing.assert_close(ours(x, memory), theirs(x, memory, memory)[0], rtol=1e-5, atol=1e-5)


def test_cross_decoders_process_predicted_tokens_only() -> None:
    model, objective = with_decoder(attend="cross", blocks=2)
    rows, seen = batch(), []
    for block in model.mask_decoder.blocks:
        block.register_forward_pre_hook(lambda _, given: seen.append((given[0].shape[1], given[2].shape[1])))
    objective.predict(model, rows)
    assert seen == [(rows["places"].shape[1], rows["visible"].shape[1])] * 2 == [(12, 14)] * 2


@pytest.mark.parametrize("attend", ATTEND)
def test_masked_tokens_do_not_reach_predictions(attend: str) -> None:
    model, objective = with_decoder(encoder(tied=False), attend=attend)
    rows = batch()
    hidden = torch.ones_like(rows["tokens"], dtype=torch.bool).scatter(1, rows["visible"], False)
    other = rows["tokens"].masked_fill(hidden, 77)
    changed = Batch({**rows.fields, "tokens": other, "targets": rows["targets"].flip(1)}, rows.weight)
    before = objective.predict(model, rows).hidden
    assert torch.equal(objective.predict(model, changed).hidden, before)
    objective.losses(objective.predict(model, rows), rows).sum().backward()
    read = rows["tokens"].gather(1, rows["visible"])
    trained = model.embedding.token.weight.grad.abs().amax(1) > 0
    assert not trained[OBJECTIVE.mask] and OBJECTIVE.mask not in read
    assert set(trained.nonzero().flatten().tolist()) == set(read.flatten().tolist())
    assert model.mask_decoder.mask.grad.abs().max() > 0


@pytest.mark.parametrize("attend", ATTEND)
def test_predictions_depend_on_their_position(attend: str) -> None:
    model, objective = with_decoder(attend=attend)
    prediction = objective.predict(model, batch()).hidden
    assert torch.pdist(prediction[0]).min() > 1e-3


def test_every_unmasked_token_is_read() -> None:
    for rate, length in ((0.15, 40), (0.5, 40), (0.5, 24), (0.3, 10)):
        objective = replace(OBJECTIVE, rate=rate)
        packed = PackedTokens(corpus(), length, 50, seed=1).at(0)
        rows = objective.examples(packed)
        count = rows["places"].shape[1]
        most = -int(-8 * count // 10)
        shown = rows["tokens"].gather(1, rows["visible"])
        assert rows["visible"].shape == (50, length - most) and OBJECTIVE.mask not in shown
        masks = (rows["tokens"] == OBJECTIVE.mask).sum(1)
        assert set(masks.tolist()) <= {most - 1, most} and (most * 10 != 8 * count or set(masks.tolist()) == {most})
        chosen = torch.zeros_like(rows["tokens"], dtype=torch.bool).scatter(1, rows["places"], True)
        seen = torch.zeros_like(chosen).scatter(1, rows["visible"], True)
        assert (seen | chosen).all() and (rows["visible"].diff(dim=1) > 0).all()


def test_counted_flops_are_those_of_fewer_tokens() -> None:
    def flops(*chosen: DropMaskedTokens) -> float:
        plain = BaseRun(long, PackedTokens(corpus(), 120, 2, seed=0), OBJECTIVE)
        run = compose(plain, with_optimizer(chosen), 2)
        return count(run, run.techniques)[1].flops

    def long() -> nn.Module:
        return assemble(replace(SHAPE, depth=6, length=120, vocabulary=VOCABULARY))

    def step(decoder: str = "") -> float:
        """Three passes of 2 FLOPs per weight and token; attention 4 t² d forward and 2.5 times that backward."""
        text, k = 120, 60
        read = text - round(0.8 * k) if decoder else text

        def block(tokens: int, over: int = 0) -> float:
            linear = 6 * tokens * (4 * 32 * 32 + 2 * 32 * 48)
            cross = 6 * (2 * tokens * 32 * 32 + 2 * over * 32 * 32) if over else 0
            return linear + cross + 14 * 32 * (tokens**2 + tokens * over)

        behind = {"": 0, "self": 2 * block(text), "cross": 2 * block(k, over=read)}[decoder]
        transform = 6 * (k if decoder else text) * 32 * 32
        return 2 * (6 * block(read) + behind + transform + 6 * k * 32 * VOCABULARY)

    plain, through_all, through_some = (
        flops(),
        *(flops(DropMaskedTokens(blocks=2, attend=decoder)) for decoder in ATTEND),
    )
    assert plain == pytest.approx(step(), rel=0.02)
    assert through_all == pytest.approx(step("self"), rel=0.02) and through_all < 0.95 * plain
    assert through_some == pytest.approx(step("cross"), rel=0.02) and through_some < 0.85 * plain


def test_counted_memory_equals_the_allocator() -> None:
    run = compose(masked_run(batch=8), with_optimizer([technique("data_selection.drop_masked_tokens")]), 3)
    predicted, measured = explain(run).footprint, measure_allocations(run)
    assert predicted.parameters == measured.parameters and predicted.optimizer == measured.optimizer
    assert predicted.memory == pytest.approx(measured.peak, rel=0.05)


def test_whole_texts_are_unchanged_and_longer_ones_refused() -> None:
    model, objective = with_decoder()
    plain, tokens, keep = encoder(), batch()["tokens"], torch.ones(3, 24, dtype=torch.bool)
    keep[:, 20:] = False
    with torch.no_grad():
        assert torch.equal(model(tokens, keep=keep), plain(tokens, keep))
        assert torch.equal(model.logits(tokens), plain.logits(tokens))
    with pytest.raises(UsageError, match="48 tokens exceed this model's limit of 40"):
        objective.predict(model, batch(length=48))


def test_cross_decoders_learn() -> None:
    records, _ = run_through(
        masked_run(repeated=True), with_optimizer([DropMaskedTokens(blocks=1, attend="cross")]), 40
    )
    assert losses(records)[-1] < losses(records)[0] - 1


def test_evaluation_uses_the_decoder() -> None:
    chosen = with_optimizer([technique("data_selection.drop_masked_tokens"), technique("losses.z_loss")])
    run = compose(masked_run(), chosen, 2)
    model, rows = run.build_model(), run.source.at(0)
    judged = run.eval_objective.predict(model, rows)
    assert torch.equal(judged.hidden, model(rows["tokens"], visible=rows["visible"], places=rows["places"]))


def test_the_exported_encoder_loads_in_transformers(tmp_path: Path) -> None:
    plain = BaseRun(encoder, PackedTokens(corpus(), 24, 4, seed=0), OBJECTIVE)
    dropping = DropMaskedTokens(blocks=1)
    _, state = run_through(plain, with_optimizer([dropping]), 3)
    assert state.model is not None
    finished = dropping.finish(state.model)
    export_folder(finished, SHAPE, tmp_path / "exported")
    theirs, actual = transformers.BertForMaskedLM.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not any(actual.values())
    body = transformers.BertModel.from_pretrained(tmp_path / "exported", add_pooling_layer=False)
    tokens = batch()["tokens"]
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, finished.logits(tokens), rtol=1e-4, atol=1e-4)
        states: list[Tensor] = []
        finished.blocks[-1].register_forward_hook(lambda *given: states.append(given[-1]))
        finished(tokens)
        torch.testing.assert_close(body(tokens).last_hidden_state, states[0], rtol=1e-4, atol=1e-4)
    again, _ = import_folder(tmp_path / "exported")
    assert DropMaskedTokens().model(again) is again, "and it can be trained on"


@pytest.mark.slow
def test_two_ranks_equal_a_single_process() -> None:
    actual = on_ranks(2, trained_along)
    for name, chosen in SETTINGS.items():
        alone, state = run_through(double(), with_optimizer(chosen), 4)
        values = dict(state.model.named_parameters())
        for those, parameters in (rank[along, name] for rank in actual for along in ALONG):
            assert those == pytest.approx(losses(alone), rel=1e-6)
            assert list(parameters) == list(values)
            for path, value in values.items():
                np.testing.assert_allclose(parameters[path], value.detach().numpy(), rtol=0, atol=1e-9, err_msg=path)


@pytest.mark.parametrize(
    ("model", "objective", "what"),
    [
        (lambda: tiny_model(), OBJECTIVE, "know positions only by the order of their inputs"),
        (encoder, replace(OBJECTIVE, rate=1.0, mask_share=1.0, random_share=0.0), "the encoder has no input"),
        (encoder, plain_run().objective, "have no field `visible`"),
    ],
)
def test_unsupported_models_and_batches_are_refused(model, objective, what: str) -> None:
    plain = BaseRun(model, PackedTokens(corpus(), 16, 2, seed=0), objective)
    with pytest.raises(RefusedError, match=what) as refused:
        run_through(plain, with_optimizer([DropMaskedTokens()]), 1)
    assert refused.value.fix


@pytest.mark.parametrize("other", ["adapters.lora", "parallelism.pipeline"])
def test_frozen_decoders_and_pipelines_are_refused(other: str) -> None:
    with pytest.raises(UsageError, match="cannot be combined"):
        compose(masked_run(), with_optimizer([DropMaskedTokens(), technique(other)]), 2)


def foreign(family: str, **changed: object) -> nn.Module:
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 48, "max_position_embeddings": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "cls_token_id": 1, "sep_token_id": 2,
    }  # fmt: skip
    return built(getattr(transformers, f"{family}ForMaskedLM"), sizes | changed).eval()


def test_foreign_predictions_equal_the_parts_by_hand() -> None:
    plain, rows = foreign("Bert"), batch()
    model, objective = with_decoder(deepcopy(plain))
    visible, places = rows["visible"], rows["places"]
    with torch.no_grad():
        embedded = plain.bert.embeddings(rows["tokens"])
        states, text = gather_tokens(embedded, visible), embedded.clone()
        for layer in plain.bert.encoder.layer:
            states = layer(states)
        for row in range(3):
            for number, place in enumerate(visible[row].tolist()):
                text[row, place] = states[row, number]
        for layer in model.mask_decoder:
            text = layer(text)
        expected = gather_tokens(plain.cls(text), places)
        torch.testing.assert_close(objective.predict(model, rows).logits, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model(rows["tokens"]).logits, plain(rows["tokens"]).logits)
    weights = [dict(block.named_parameters()) for block in (*model.mask_decoder, plain.bert.encoder.layer[0])]
    for name, values in weights[-1].items():
        if values.ndim > 1:
            assert not torch.equal(weights[0][name], weights[1][name]) and not torch.equal(weights[0][name], values)


FOREIGN = {
    "Roberta": {}, "DistilBert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    "ModernBert": {"global_attn_every_n_layers": 2, "local_attention": 8}, "MPNet": {}, "RoFormer": {},
}  # fmt: skip


@pytest.mark.parametrize("family", [*FOREIGN, "torch"])
def test_foreign_encoders_read_visible_tokens_in_place(family: str) -> None:
    """The blocks see fewer tokens, no prediction depends on the masked ones, and each depends on its position."""
    model = OwnEncoder(VOCABULARY, 40) if family == "torch" else foreign(family, **FOREIGN[family])
    model, objective = with_decoder(model.eval())
    rows, lengths = batch(), []
    stack = next(blocks for name, blocks in find_stacks(model).items() if "mask_decoder" not in name)
    stack[1].register_forward_pre_hook(
        lambda block, args, kwargs: lengths.append((args or [*kwargs.values()])[0].shape[1]), with_kwargs=True
    )
    with torch.no_grad():
        before = objective.predict(model, rows).logits
        moved = Batch({**rows.fields, "visible": rows["visible"].clone()}, rows.weight)
        hidden = sorted({*range(24)} - {*rows["visible"][0].tolist()})
        moved["visible"][0, -1] = hidden[-1] if hidden[-1] > rows["visible"][0, -2] else hidden[0]
        moved["visible"][0] = moved["visible"][0].sort().values
        assert lengths == [rows["visible"].shape[1]]
        assert (objective.predict(model, moved).logits[0] - before[0]).abs().max() > 1e-5
        torch.testing.assert_close(objective.predict(model, moved).logits[1:], before[1:])


@pytest.mark.parametrize("family", ["ModernBert", "RoFormer"])
@torch.no_grad()
def test_texts_may_be_as_long_as_a_head_is_wide(family: str) -> None:
    """The arguments of the blocks have a position dim and a dim of the head's width, here both of size 8."""
    model, tokens = foreign(family, **FOREIGN[family]), torch.arange(16).view(2, 8) + 3
    prepare(model)
    expected = model(tokens).logits
    with visible_tokens_only(model, torch.stack([torch.randperm(8) for _ in range(2)])):
        torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "changed", "what"),
    [
        ("Albert", {"embedding_size": 16}, "calls its last block 2 times"),
        ("DebertaV2", {"relative_attention": True, "pos_att_type": ["c2p"]}, "does not accept a part of the tokens"),
        ("ConvBert", {"embedding_size": 32}, "know positions only by the order of their inputs"),
        ("FNet", {}, "know positions only by the order of their inputs"),
    ],
)
def test_encoders_that_need_all_tokens_are_refused(family: str, changed: dict[str, object], what: str) -> None:
    with pytest.raises(RefusedError, match=what) as refused:
        DropMaskedTokens().model(foreign(family, **changed))
    assert "bert-micro" in refused.value.fix


def test_a_foreign_encoder_has_no_cross_attention() -> None:
    with pytest.raises(RefusedError, match="cross-attention to the states of BertForMaskedLM is unknown"):
        DropMaskedTokens(attend="cross").model(foreign("Bert"))


@pytest.mark.parametrize("more", ["memory.recompute", "memory.optimal_recompute", "memory.activation_budget"])
def test_foreign_recomputed_blocks_read_the_same_tokens(more: str) -> None:
    plain = BaseRun(lambda: foreign("Bert").train(), PackedTokens(corpus(), 16, 2, seed=0), OBJECTIVE)
    seen = []
    for chosen in ([], [technique(more)]):
        torch.manual_seed(0)
        records, state = run_through(plain, with_optimizer([DropMaskedTokens(), *chosen]), 3)
        seen.append(losses(records))
        assert state.model is not None and not hasattr(DropMaskedTokens().finish(state.model), "mask_decoder")
    assert seen[0] == seen[1]
