"""Removal of heads and neurons: the smaller model computes the same as the whole one with zero coefficients."""

import re
from collections.abc import Callable

import pytest
import torch
import transformers
from drawn_models import Encoder, OddDecoder
from tiny_models import SMALL
from torch import Tensor, nn

from thrifty.core.errors import RefusedError
from thrifty.modeling.structured_pruning import (
    ZERO,
    add_coefficients,
    find_columns,
    find_units,
    fold_coefficients,
    is_pruned,
    pad_with_zeros,
    prune_units,
)
from thrifty.models.families import assemble
from thrifty.models.hf_wrapper import HuggingFaceCausalLM, HuggingFaceMaskedLM
from thrifty.models.model_config import ModelConfig
from thrifty.models.transformer import initialize

TOKENS = (torch.arange(24) * 7 % 60).view(2, 12)
IMAGES = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}


def ours(style: str, heads: int = 4, kv_heads: int | None = None, **more: object) -> nn.Module:
    model = assemble(ModelConfig(style, 2, 32, heads, kv_heads or heads, 24, 60, 12, style != "vit", **more))  # type: ignore[arg-type]
    initialize(model, 0, std=0.2)
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
    for parameter in biases:
        nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(len(parameter)))
    return model.double().eval()


def bart() -> nn.Module:
    torch.manual_seed(0)
    shape = {f"{part}_{name}": number for part in ("encoder", "decoder") for name, number in
             (("layers", 2), ("attention_heads", 4), ("ffn_dim", 24))}  # fmt: skip
    config = transformers.BartConfig(vocab_size=60, d_model=32, max_position_embeddings=64, init_std=0.2, **shape)
    return transformers.BartForConditionalGeneration(config).double().eval()


def theirs(kind: str, wrapper: type = HuggingFaceCausalLM, **more: object) -> nn.Module:
    config = getattr(transformers, f"{kind}Config")(**SMALL, **more)
    torch.manual_seed(0)
    auto = transformers.AutoModelForMaskedLM if wrapper is HuggingFaceMaskedLM else transformers.AutoModelForCausalLM
    return wrapper(auto.from_config(config)).double().eval()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: ours("llama"),
    "llama with groups": lambda: ours("llama", 8, 4),
    "llama with one key": lambda: ours("llama", 4, 1),
    "gpt": lambda: ours("gpt"),
    "gpt1": lambda: ours("gpt1"),
    "bert": lambda: ours("bert"),
    "marian": lambda: ours("marian"),
    "vit": lambda: ours("vit", image=8, patch=4, channels=1),
    "Llama of transformers": lambda: theirs("Llama", num_key_value_heads=4),
    "Llama of transformers with groups": lambda: theirs("Llama", **GROUPED),
    "Llama of transformers with one key": lambda: theirs("Llama", num_key_value_heads=1),
    "Qwen2 of transformers": lambda: theirs("Qwen2", num_key_value_heads=2),
    "Qwen3 of transformers": lambda: theirs("Qwen3", **GROUPED),
    "Mistral of transformers": lambda: theirs("Mistral", **GROUPED),
    "BERT of transformers": lambda: theirs("Bert", HuggingFaceMaskedLM),
    "DistilBERT of transformers": lambda: theirs("DistilBert", HuggingFaceMaskedLM, dim=32, n_heads=4, n_layers=2),
    "hand-written, queries, keys and values in one": lambda: OddDecoder(depth=2).double().eval(),
    "GPT-2 of transformers, fused in Conv1D": lambda: theirs("GPT2", n_embd=32, n_head=4, n_layer=2, n_inner=24),
    "NeoX of transformers": lambda: theirs("GPTNeoX"),
    "StableLM of transformers": lambda: theirs("StableLm", num_key_value_heads=4),
    "BART of transformers": bart,
    "OPT of transformers": lambda: theirs("OPT", ffn_dim=48, word_embed_proj_dim=32),
}
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "position biases for all blocks": (lambda: ours("t5"), "relative.scores.weight, which has a part for each head"),
    "a module of torch": (lambda: Encoder(), "MultiheadAttention, from which no unit can be removed"),
    "a norm over all heads": (lambda: theirs("Olmo2", num_key_value_heads=4), "an element for each unit"),
    "sizes of the configuration": (lambda: theirs("Phi3", num_key_value_heads=4), "pruning cannot change"),
    "ALiBi": (lambda: theirs("Bloom", n_head=4, n_layer=2), "cannot change the position biases"),
    "projected positions": (
        lambda: theirs("DebertaV2", HuggingFaceMaskedLM, relative_attention=True, pos_att_type=["p2c", "c2p"]),
        "pos_key_proj.weight, which has a part for each head",
    ),
}


@torch.no_grad()
def answer(model: nn.Module) -> Tensor:
    if isinstance(model, transformers.BartForConditionalGeneration):
        return model(input_ids=TOKENS, decoder_input_ids=TOKENS[:, :5]).logits
    if hasattr(model, "decoder"):
        return model(TOKENS, TOKENS[:, :5])
    return model(IMAGES.double() if hasattr(model, "pool") else TOKENS)


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    return MODELS[request.param]()


def some_units(model: nn.Module) -> dict[str, list[int]]:
    """Return different units of each block; of heads at least one, and not the first."""
    kept = {}
    for name, pieces in find_units(model).items():
        generator = torch.Generator().manual_seed(len(kept))
        left = max(1, round((0.4 + 0.2 * (len(kept) % 3)) * pieces.count))
        kept[name] = sorted(torch.randperm(pieces.count, generator=generator)[:left].tolist())
    return kept


@torch.no_grad()
def masked(model: nn.Module, kept: dict[str, list[int]]) -> Tensor:
    for name, pieces in find_units(model).items():
        add_coefficients(pieces)
        gone = [piece for piece in range(pieces.count) if piece not in kept[name]]
        pieces.writer.coefficients[gone] = 0.0
    return answer(model)


def test_every_branch_has_its_units(model: nn.Module) -> None:
    units = list(find_units(model).values())
    kinds = [pieces.kind for pieces in units]
    assert kinds in (["heads", "neurons"] * 2, ["heads", "neurons"] * 2 + ["heads", "heads", "neurons"] * 2)
    for pieces in units:
        assert pieces.count * pieces.width == pieces.writer.weight.shape[pieces.dim]
        assert not is_pruned(model)


def test_the_smaller_model_computes_the_same_as_the_masked(model: nn.Module, request: pytest.FixtureRequest) -> None:
    kept, whole = some_units(model), answer(model)
    before = sum(parameter.numel() for parameter in model.parameters())
    for name, pieces in find_units(model).items():
        prune_units(pieces, kept[name])
    smaller = answer(model)
    expected = masked(MODELS[request.node.callspec.params["model"]](), kept)
    assert float((smaller - expected).abs().max()) < 1e-6
    assert float((smaller - whole).abs().max()) > 1e-3
    assert is_pruned(model)
    assert {name: pieces.count for name, pieces in find_units(model).items()} == {n: len(k) for n, k in kept.items()}
    after = sum(parameter.numel() for parameter in model.parameters())
    assert after < before


def test_padding_with_zeros_computes_the_same(model: nn.Module) -> None:
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    kept = some_units(model)
    counts = {name: pieces.count for name, pieces in find_units(model).items()}
    for name, pieces in find_units(model).items():
        prune_units(pieces, kept[name])
    smaller = answer(model)
    for name, pieces in find_units(model).items():
        prune_units(pieces, pad_with_zeros(pieces, counts[name]))
    assert float((answer(model) - smaller).abs().max()) < 1e-6
    assert {name: parameter.shape for name, parameter in model.named_parameters()} == shapes


def test_reordered_units_compute_the_same(model: nn.Module) -> None:
    before = answer(model)
    for pieces in find_units(model).values():
        prune_units(pieces, list(reversed(range(pieces.count))))
    assert float((answer(model) - before).abs().max()) < 1e-6


def test_coefficients_start_at_one_and_fold_into_the_weights(model: nn.Module) -> None:
    names, before = list(dict(model.named_parameters())), answer(model)
    for pieces in find_units(model).values():
        add_coefficients(pieces)
    assert torch.equal(answer(model), before)
    with torch.no_grad():
        for index, pieces in enumerate(find_units(model).values()):
            pieces.writer.coefficients.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(index))
    scaled = answer(model)
    fold_coefficients(model)
    assert float((answer(model) - scaled).abs().max()) < 1e-6
    assert list(dict(model.named_parameters())) == names
    assert float((scaled - before).abs().max()) > 1e-3


@pytest.mark.parametrize("case", ["position biases for all blocks", "a module of torch", "projected positions"])
def test_neurons_are_removed_where_heads_cannot_be(case: str) -> None:
    model = REFUSED[case][0]()
    units = find_units(model, {"neurons"})
    assert {pieces.kind for pieces in units.values()} == {"neurons"} and not is_pruned(model)
    first = next(iter(units.values()))
    prune_units(first, [0, 1])
    assert is_pruned(model, {"neurons"}) and not is_pruned(model, {"heads"})
    assert answer(model).isfinite().all()


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_structures_are_refused(case: str) -> None:
    make, reason = REFUSED[case]
    with pytest.raises(RefusedError, match=re.escape(reason)) as refused:
        find_units(make())
    assert refused.value.fix


@pytest.mark.parametrize("name", ["Bloom", "Falcon", "Phi3", "torch"])
def test_heads_that_cannot_be_removed_are_columns(name: str) -> None:
    more = {"n_head": 4, "n_layer": 2} if name == "Bloom" else {}
    model = Encoder() if name == "torch" else theirs(name, **more)
    columns = find_columns(model, neurons=False)
    assert {(each.count, each.width, each.rows) for each in columns.values()} == {(4, 8, ())}
    for path, each in columns.items():
        assert model.get_submodule(path) is each.writer and isinstance(each.writer, nn.Linear)


def test_zero_in_an_order_is_a_unit_of_zeros() -> None:
    model = ours("gpt")
    pieces = find_units(model)["blocks.0.mlp.down"]
    first = model.blocks[0].mlp.up.weight[3].detach().clone()
    prune_units(pieces, [3, ZERO])
    up, down = model.blocks[0].mlp.up, model.blocks[0].mlp.down
    assert torch.equal(up.weight[0], first) and not up.weight[1].any() and not up.bias[1:].any()
    assert down.weight.shape == (32, 2) and not down.weight[:, 1].any()
    assert (up.out_features, down.in_features) == (2, 2)
