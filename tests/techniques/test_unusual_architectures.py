"""Initializations on unusual architectures: shared groups, norms in lists, two towers, branches without weights."""

import math

import pytest
import torch
import transformers
from stacked_models import HEADS, HIDDEN, LABELS, LENGTH, PIXELS, TARGETS, TOKENS, VOCABULARY, WIDTH
from torch import nn

from thrifty.core.errors import RefusedError
from thrifty.core.run_notes import collect_notes
from thrifty.core.technique import Technique
from thrifty.modeling.residual_branches import find_branches
from thrifty.modeling.stream_norms import is_bypassed, is_norm
from thrifty.techniques.initializations._branch_matrices import matrices
from thrifty.techniques.initializations.fixup import Fixup
from thrifty.techniques.initializations.layer_scale import LayerScale
from thrifty.techniques.initializations.rezero import ReZero
from thrifty.techniques.initializations.skip_init import SkipInit
from thrifty.techniques.initializations.t_fixup import TFixup, encoder_factor

WITHOUT_NORMS: tuple[Technique, ...] = (ReZero(), SkipInit(), Fixup(), TFixup())
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_attention_heads": HEADS, "intermediate_size": HIDDEN,
    "num_hidden_layers": 2, "max_position_embeddings": LENGTH, "pad_token_id": 0,
}  # fmt: skip
TOWER = {key: value for key, value in SIZES.items() if key not in ("vocab_size", "max_position_embeddings")}


def theirs(architecture: str, configuration: str, **settings: object) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{configuration}Config")(**settings)
    return getattr(transformers, architecture)(config).eval()


def albert(depth: int) -> nn.Module:
    return theirs("AlbertForMaskedLM", "Albert", **SIZES | {"num_hidden_layers": depth}, embedding_size=16)


def siglip() -> nn.Module:
    sides = {"text_config": TOWER | {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH}}
    return theirs("SiglipModel", "Siglip", **sides, vision_config=TOWER | {"image_size": 16, "patch_size": 4})


def test_repeated_blocks_count_each_time() -> None:
    with collect_notes() as notes:
        model = TFixup().model(albert(16))
    assert any("count as 16, since they run repeatedly" in note for note in notes)
    value = model.get_submodule("albert.encoder.albert_layer_groups.0.albert_layers.0.attention.value").weight
    bound = encoder_factor(16) * math.sqrt(6 / (2 * WIDTH))
    assert 0.97 * bound < float(value.detach().abs().max()) <= bound * (1 + 1e-6)
    scaled = LayerScale().model(albert(24)).named_parameters()
    assert {round(float(p.detach().mean()), 9) for name, p in scaled if name.endswith("gain")} == {1e-5}
    with pytest.raises(RefusedError, match="exceeds 1 / sqrt\\(32 branches\\)"):
        SkipInit(initial_value=0.5).model(albert(16))
    with collect_notes() as notes:
        Fixup().model(albert(16))
    assert "L is 32" in notes


def test_two_towers_have_no_zero_head() -> None:
    model = Fixup().model(siglip())
    loss = model(input_ids=TOKENS, pixel_values=PIXELS[:2], return_loss=True).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert model.text_model.head.weight.any() and model.text_model.head.weight.grad.any()


@torch.no_grad()
def test_separate_norm_lists_are_stream_norms() -> None:
    settings = {"vocab_size": VOCABULARY, "emb_dim": WIDTH, "n_layers": 2, "n_heads": HEADS, "pad_index": 0}
    for one in WITHOUT_NORMS:
        with collect_notes() as notes:
            model = one.model(theirs("XLMWithLMHeadModel", "XLM", **settings))
        assert all(is_bypassed(module) for module in model.modules() if is_norm(module))
        assert not isinstance(one, Fixup) or "L is 4" in notes
        if not isinstance(one, TFixup):
            stream: list[torch.Tensor] = []
            model.transformer.attentions[0].register_forward_pre_hook(lambda _, args, s=stream: s.append(args[0]))
            found = model.transformer(input_ids=TOKENS.clamp(min=1)).last_hidden_state
            assert torch.equal(found, stream[0])


def test_weight_norm_is_no_stream_norm() -> None:
    settings = {"conv_dim": [8], "conv_stride": [5], "conv_kernel": [10], "num_conv_pos_embeddings": 8}
    plain = theirs("Wav2Vec2Model", "Wav2Vec2", **SIZES, **settings, num_conv_pos_embedding_groups=2)
    kernel = plain.encoder.pos_conv_embed.conv.weight.detach().clone()
    model = ReZero().model(plain)
    assert torch.equal(model.encoder.pos_conv_embed.conv.weight, kernel)
    assert torch.isfinite(model(torch.linspace(-1, 1, 400).view(1, 400)).last_hidden_state).all()


def test_branch_without_weights_is_refused() -> None:
    for one in (*WITHOUT_NORMS, LayerScale()):
        with pytest.raises(
            RefusedError, match=r"fnet\.encoder\.layer\.0\.fourier has a norm and no layer with weights"
        ):
            one.model(theirs("FNetForMaskedLM", "FNet", **SIZES))


def test_quantizing_norm_is_refused_or_kept() -> None:
    def quantised() -> nn.Module:
        return theirs("IBertForMaskedLM", "IBert", **SIZES | {"max_position_embeddings": LENGTH + 2})

    for one in WITHOUT_NORMS:
        with pytest.raises(RefusedError, match="has child modules and cannot be bypassed") as refused:
            one.model(quantised())
        assert "layer_scale" in refused.value.fix
    LayerScale().model(quantised())(input_ids=TOKENS, labels=TARGETS).loss.backward()


def test_tables_with_several_outputs_are_multiplied() -> None:
    sides = {f"num_{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    sizes = {"hidden_size": WIDTH, "encoder_ffn_dim": HIDDEN, "decoder_ffn_dim": HIDDEN, "vocab_size": VOCABULARY}
    model = ReZero().model(theirs("ProphetNetForConditionalGeneration", "ProphetNet", **sizes, **sides))
    assert torch.isfinite(model(input_ids=TOKENS, labels=TARGETS).loss)


@pytest.mark.parametrize(
    ("architecture", "settings", "folded"),
    [
        (
            "GPTNeo",
            {"num_layers": 2, "num_heads": HEADS, "attention_types": [[["global", "local"], 1]], "hidden_size": WIDTH,
             "vocab_size": VOCABULARY},
            (WIDTH // HEADS) ** -0.5,
        ),
        ("Esm", SIZES, 1.0),
    ],
)  # fmt: skip
def test_unscaled_scores_divide_queries(architecture: str, settings: dict[str, object], folded: float) -> None:
    model = theirs(f"{architecture}Model", architecture, **settings)
    found = [matrix for blocks in find_branches(model).values() for branch in blocks[0] for matrix in matrices(branch)]
    assert [matrix.folded for matrix in found if matrix.role == "query"] == [folded]


def test_vit_with_registers_learns_without_norms() -> None:
    settings = TOWER | {"image_size": 16, "patch_size": 4, "num_labels": 4, "num_register_tokens": 2}
    for one in WITHOUT_NORMS:
        model = one.model(theirs("Dinov2WithRegistersForImageClassification", "Dinov2WithRegisters", **settings))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
        losses = []
        for _ in range(4):
            losses.append(model(pixel_values=PIXELS, labels=LABELS).loss)
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
        assert losses[-1] < losses[0]


class Translator(nn.Module):
    """torch's encoder-decoder, whose decoder blocks have two `nn.MultiheadAttention`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.both = nn.Transformer(WIDTH, HEADS, 2, 2, HIDDEN, 0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = self.embed(tokens)
        return self.head(self.both(rows, rows))


class InSequence(nn.Module):
    """A model with blocks in an `nn.Sequential`, as in timm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layers = [nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, 0.0, batch_first=True) for _ in range(3)]
        self.blocks, self.head = nn.Sequential(*layers), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(tokens)))


@pytest.mark.parametrize(
    ("kind", "last", "branches"), [(Translator, "both.decoder.layers", 10), (InSequence, "blocks", 6)]
)
@pytest.mark.parametrize("one", [*WITHOUT_NORMS, LayerScale()], ids=lambda one: one.name)
def test_torch_decoder_and_sequential_are_treated(
    kind: type[nn.Module], last: str, branches: int, one: Technique
) -> None:
    torch.manual_seed(0)
    model = one.model(kind()).train()
    blocks = model.get_submodule(last)
    gains = [name for name, _ in model.named_parameters(remove_duplicate=False) if name.endswith("gain")]
    assert len(gains) == (0 if isinstance(one, TFixup) else branches)
    stream: list[torch.Tensor] = []
    blocks[0].register_forward_pre_hook(lambda block, args: stream.append(args[0]))
    blocks[-1].register_forward_hook(lambda block, args, output: stream.append(output))
    nn.functional.cross_entropy(model(TOKENS).flatten(0, 1), TARGETS.flatten()).backward()
    assert torch.equal(*stream) == isinstance(one, ReZero | SkipInit | Fixup)
