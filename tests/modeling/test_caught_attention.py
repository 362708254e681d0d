"""Attention as it is written: every form is found, and its core replaced, with equal outputs and gradients."""

import math
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.transformer import TransformerEncoderLayer

from thrifty.core.errors import RefusedError
from thrifty.core.run_notes import collect_notes
from thrifty.core.technique import Technique
from thrifty.modeling.attention_calls import is_causal
from thrifty.modeling.attention_cores import SwappableCore, call_core
from thrifty.modeling.attention_sites import find_attention_sites
from thrifty.modeling.attention_trial import observed_heads
from thrifty.techniques.attention.tiled import TiledAttention
from thrifty.techniques.attention.window import WindowAttention

WIDTH, HEADS, LENGTH, ROWS = 16, 4, 12, 2


class Attention(nn.Module):
    """Projections of a hand-written attention; forms differ in `forward`."""

    def __init__(self, causal: bool = True, dropout: float = 0.0):
        super().__init__()
        self.heads, self.causal, self.rate = HEADS, causal, dropout
        self.qkv, self.proj, self.dropout = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)
        self.softmax = nn.Softmax(dim=-1)
        self.register_buffer("past", torch.ones(64, 64, dtype=torch.bool).tril())
        self.slopes = nn.Parameter(torch.linspace(0.5, 1.5, HEADS))
        self.table = nn.Parameter(torch.linspace(-1, 1, HEADS * LENGTH * LENGTH).view(1, HEADS, LENGTH, LENGTH))

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))

    def merge(self, y: Tensor) -> Tensor:
        return self.proj(y.transpose(1, 2).flatten(2))

    def hidden(self, x: Tensor) -> Tensor:
        return ~self.past[: x.shape[1], : x.shape[1]] & self.causal


class Fused(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        rate = self.rate if self.training else 0.0
        return self.merge(F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=self.causal))


class FusedInHelper(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, None, 0.0, self.causal)

    def forward(self, x: Tensor) -> Tensor:
        return self.merge(self.attend(*self.split(x)))


class Chosen(Attention):
    def forward(self, x: Tensor) -> Tensor:
        is_causal = self.causal and x.shape[1] > 1
        return self.merge(F.scaled_dot_product_attention(*self.split(x), is_causal=is_causal))


class FusedWithMask(Attention):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(x.shape[1], x.shape[1]).masked_fill(self.hidden(x), -math.inf)
        return self.merge(F.scaled_dot_product_attention(*self.split(x), attn_mask=mask, scale=0.5))


class Nano(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.hidden(x), float("-inf"))
        att = self.dropout(F.softmax(att, dim=-1))
        return self.merge(att @ v)


class Additive(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        scores = torch.matmul(q / k.shape[-1] ** 0.5, k.mT) + self.hidden(x).float() * -1e9
        return self.merge(torch.matmul(self.softmax(scores.float()).type_as(v), v))


class Einsum(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in self.split(x))  # (b, t, h, k)
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[-1])
        weights = torch.where(self.hidden(x), -1e9, scores).softmax(-1)
        return self.proj(torch.einsum("bhts,bshd->bthd", weights, v).flatten(2))


class MergedHeads(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.flatten(0, 1) for each in self.split(x))
        scores = torch.bmm(q, k.transpose(1, 2)) * q.shape[-1] ** -0.5
        scores = scores.view(len(x), HEADS, x.shape[1], x.shape[1])
        scores = scores.masked_fill(self.hidden(x), torch.finfo(scores.dtype).min)
        weights = F.softmax(scores, dim=-1).view(len(x) * HEADS, x.shape[1], x.shape[1])
        return self.merge(torch.bmm(weights, v).view(len(x), HEADS, x.shape[1], -1))


class Grouped(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        q, k, v = q.unflatten(1, (2, 2)), k[:, :2, None], v[:, :2, None]  # (b, g, r, t, k)
        weights = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(self.hidden(x), -math.inf).softmax(-1)
        return self.merge((weights @ v).flatten(1, 2))


class Temperature(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        scores = (q @ k.mT) * self.slopes[:, None, None]
        return self.merge(scores.masked_fill(self.hidden(x), -math.inf).softmax(-1) @ v)


class PositionBias(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        scores = (q @ k.mT + self.table[..., : x.shape[1], : x.shape[1]]) * 0.5
        return self.merge(scores.masked_fill(self.hidden(x), -math.inf).softmax(-1) @ v)


class AddedProduct(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.flatten(0, 1) for each in self.split(x))
        bias = self.table[0].repeat(len(x), 1, 1)
        scores = bias.baddbmm(batch1=q, batch2=k.mT, beta=0.5, alpha=0.3).masked_fill(self.hidden(x), -1e9)
        return self.merge((scores.softmax(-1) @ v).unflatten(0, (-1, HEADS)))


class Disentangled(Attention):
    """Scores of contents and of distances, as in DeBERTa: a second matmul of the queries, gathered by distance."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        places = torch.arange(x.shape[1])
        distance = (places[:, None] - places).expand(len(x), HEADS, -1, -1) + x.shape[1] - 1
        far = self.table.reshape(HEADS, -1, WIDTH // HEADS)[:, : 2 * x.shape[1] - 1]
        scores = q @ k.mT / 3.0
        scores = scores + torch.matmul(q, far.mT).gather(-1, distance)
        return self.merge(scores.masked_fill(self.hidden(x), -1e9).softmax(-1) @ v)


class TwoProducts(Attention):
    """Scores of contents and positions of the same shape, added before the scale."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        places = self.table[0, :, : x.shape[1], : WIDTH // HEADS].expand(len(x), -1, -1, -1)
        scores = (q @ k.mT + q @ places.mT) * 0.5
        return self.merge(scores.masked_fill(self.hidden(x), -1e9).softmax(-1) @ v)


class InPlace(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        scores = q @ k.mT
        scores *= self.slopes[:, None, None].detach()
        scores += self.hidden(x).float() * -1e9
        return self.merge(scores.softmax(-1) @ v) + self.merge(q)


class Filled(Attention):
    """Hides pairs by writes into the scores and into a view of them."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        scores, hidden = q @ k.mT / 2.0, self.hidden(x)
        scores[..., -1].masked_fill_(hidden[:, -1], -1e9)
        scores[hidden.expand_as(scores)] = -1e9
        return self.merge(scores.softmax(-1) @ v)


class Bundled(Attention):
    """torch's own module."""

    def __init__(self, causal: bool = True, dropout: float = 0.0):
        super().__init__(causal, dropout)
        self.bundle = nn.MultiheadAttention(WIDTH, HEADS, dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.zeros(len(x), x.shape[1], dtype=torch.bool)
        padding[0, -3:] = True
        return self.bundle(x, x, x, attn_mask=self.hidden(x), key_padding_mask=padding, need_weights=False)[0]


class Positioned(Bundled):
    """Adds positions to queries and keys only, as DETR does."""

    def forward(self, x: Tensor) -> Tensor:
        q = x + torch.linspace(-1, 1, x.shape[1])[:, None]
        return self.bundle(q, q, x, attn_mask=self.hidden(x), need_weights=False)[0]


FORMS: dict[str, type[Attention]] = {
    form.__name__: form
    for form in (
        Fused, FusedInHelper, Chosen, FusedWithMask, Nano, Additive, Einsum, MergedHeads, Grouped, Temperature,
        PositionBias, AddedProduct, Disentangled, TwoProducts, InPlace, Filled, Bundled, Positioned,
    )
}  # fmt: skip


def build(form: str, causal: bool, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(FORMS[form](causal, dropout), FORMS[form](causal, dropout))


def inputs() -> Tensor:
    return torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


def outputs_and_gradients(model: nn.Module) -> list[Tensor]:
    x = inputs().requires_grad_()
    out = model(x)
    out.square().sum().backward()
    gradients = [p.grad for _, p in model.named_parameters() if p.grad is not None]
    return [out.detach(), x.grad, *gradients]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_a_window_over_all_tokens_equals_the_module(form: str, causal: bool) -> None:
    plain, replaced = (build(form, causal) for _ in range(2))
    called = count_calls(replaced, WindowAttention(window=64, block=4))
    torch.testing.assert_close(outputs_and_gradients(replaced), outputs_and_gradients(plain), rtol=1e-4, atol=1e-5)
    assert len(called) == 2


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_a_window_hides_the_same_pairs_in_every_form(form: str, causal: bool) -> None:
    model = build(form, causal)
    WindowAttention(window=3, block=4).model(model)
    x = inputs().requires_grad_()
    model[0](x)[0, 8].sum().backward()
    reached = x.grad[0].abs().sum(-1).nonzero().flatten().tolist()
    assert reached == ([6, 7, 8] if causal else [6, 7, 8, *([9, 10] if form != "Bundled" else [])])


def count_calls(model: nn.Module, technique: WindowAttention) -> list[str]:
    """Replace the cores of a model, and return a list to which each core appends its site's name."""
    called: list[str] = []

    def counting(name: str, core: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def count(*args: Tensor, **options: float) -> Tensor:
            called.append(name)
            return core(*args, **options)

        return count

    for site in find_attention_sites(model):
        site.put(counting(site.name, technique.core(site, {})))
    return called


@pytest.mark.parametrize(
    "technique", [WindowAttention(window=64, block=4), TiledAttention(tile=4)], ids=["window", "tiled"]
)
@pytest.mark.parametrize("form", FORMS)
def test_autocast_has_the_result_of_the_module(form: str, technique: Technique) -> None:
    plain, replaced = (build(form, causal=True) for _ in range(2))
    technique.model(replaced)
    with torch.autocast("cpu", torch.bfloat16):
        expected, actual = plain(inputs()), replaced(inputs())
    torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("form", FORMS)
def test_taking_cores_away_restores_the_module(form: str) -> None:
    model = build(form, causal=True)
    before = model(inputs())
    for site in find_attention_sites(model):
        site.put(lambda q, k, v, *rest, **options: torch.zeros_like(q))
    assert not torch.equal(model(inputs()), before)
    for site in find_attention_sites(model):
        site.take_away()
    assert torch.equal(model(inputs()), before)


@pytest.mark.parametrize("form", ["Fused", "Nano", "Bundled"])
def test_dropout_of_weights_reaches_the_core(form: str) -> None:
    model = build(form, True, dropout=0.25)
    seen: list[float] = []

    def core(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0) -> Tensor:
        seen.append(dropout)
        return torch.zeros_like(q)

    for site in find_attention_sites(model):
        site.put(core)
    model(inputs())
    model.eval()(inputs())
    assert seen == [0.25, 0.25, 0.0, 0.0]


@pytest.mark.parametrize("form", ["Fused", "FusedWithMask", "Nano", "Additive", "Einsum", "Temperature"])
def test_compiled_code_calls_the_core(form: str) -> None:
    model = build(form, causal=True)
    WindowAttention(window=3, block=4).model(model)
    eager = outputs_and_gradients(model)
    model.zero_grad()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(outputs_and_gradients(compiled), eager, rtol=1e-4, atol=1e-5)


def test_causal_calls_are_known_before_they_run() -> None:
    causal = {form: is_causal(FORMS[form](causal=True)) for form in ("Fused", "FusedWithMask", "Nano")}
    assert causal == {"Fused": True, "FusedWithMask": False, "Nano": False}
    assert is_causal(Fused(causal=False)) is False
    assert is_causal(Chosen()) is False


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_tiles_compute_what_the_module_computes(form: str, causal: bool) -> None:
    model = build(form, causal)
    expected = outputs_and_gradients(model)
    model.zero_grad()
    TiledAttention(tile=4).model(model)
    torch.testing.assert_close(outputs_and_gradients(model), expected, rtol=1e-4, atol=1e-5)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross = nn.MultiheadAttention(WIDTH, HEADS), nn.MultiheadAttention(WIDTH, HEADS)
        self.reader, self.memory = nn.MultiheadAttention(WIDTH, HEADS), nn.Parameter(torch.randn(3, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.own(x, x, x)[0]
        return x + self.reader(x, self.memory.expand(-1, x.shape[1], -1), self.memory.expand(-1, x.shape[1], -1))[0]


def test_attention_to_another_sequence_is_left_out_and_named() -> None:
    with collect_notes() as notes:
        sites = find_attention_sites(Decoder())
    assert [site.name for site in sites] == ["own"]
    assert any("reader" in note and "cross" in note for note in notes)
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS)
    assert [site.name for site in find_attention_sites(layer)] == ["self_attn"]


class Wide(FusedWithMask):
    """Values are wider than queries and keys."""

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = super().split(x)
        return q[..., 1:], k[..., 1:], v


def test_values_of_another_width_show_heads_and_causality() -> None:
    (site,) = find_attention_sites(nn.Sequential(Wide()))
    assert site.hides_later_keys
    assert observed_heads(site.module, WIDTH) == (HEADS, HEADS, WIDTH // HEADS - 1)


class Both(nn.Module):
    """Attention to the tokens and to another sequence, by modules in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor, other: Tensor) -> list[Tensor]:
        return [part(x, each, each, need_weights=False)[0] for part, each in zip(self.parts, (x, other), strict=True)]


def test_another_sequence_of_equal_length_is_left_to_torch() -> None:
    torch.manual_seed(0)
    model, x, other = Both(), inputs(), inputs().flip(1)
    plain = model(x, other)
    WindowAttention(window=1, block=4).model(model)
    own, crossed = model(x, other)
    assert not torch.allclose(own, plain[0])
    assert torch.equal(crossed, plain[1])


class Merged(Attention):
    """Attention to every second token."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.merge(F.scaled_dot_product_attention(q, k[:, :, ::2], v[:, :, ::2]))


class WithZero(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.bundle = nn.MultiheadAttention(WIDTH, HEADS, add_zero_attn=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.bundle(x, x, x, need_weights=False)[0]


def test_attention_with_other_keys_is_left_out_and_named() -> None:
    model = nn.Sequential(Nano(), Merged(), WithZero())
    expected = model[1:](inputs())
    with collect_notes() as notes:
        assert [site.name for site in find_attention_sites(model)] == ["0"]
    assert notes == ["left out, because their keys are not those of their tokens: 1, 2.bundle"]
    WindowAttention(window=1, block=4).model(model)
    assert torch.equal(model[1:](inputs()), expected)


class Inspected(Merged):
    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        assert x.abs().max().item() < 1e9
        return super().split(x)


def test_keys_are_seen_in_modules_that_read_their_inputs() -> None:
    assert [site.name for site in find_attention_sites(nn.Sequential(Fused(), Inspected()))] == ["0"]


class Cached(Attention):
    """Attention with a position bias and scales, which are kept outside of the module."""

    kept: ClassVar[dict[str, Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        bias = self.kept.setdefault("bias", torch.full((HEADS, 1, 1), 0.5, dtype=x.dtype))
        scales = self.kept.setdefault("scales", self.slopes.detach().exp())
        q, k, v = self.split(x)
        return self.merge(F.scaled_dot_product_attention(q * scales[:, None, None], k, v, attn_mask=bias))


def test_what_modules_keep_for_later_calls_is_right() -> None:
    model = nn.Sequential(Cached()).bfloat16()
    find_attention_sites(model)
    found = {**Cached.kept}
    Cached.kept.clear()
    model(inputs().bfloat16())
    assert all(type(found[name]) is Tensor and torch.equal(found[name], kept) for name, kept in Cached.kept.items())
    assert all(found[name].dtype == torch.bfloat16 for name in Cached.kept)


def test_sites_are_found_without_copies_of_weights() -> None:
    model = nn.Sequential(Fused(), Merged()).bfloat16()
    for module in model:
        large = torch.ones((), dtype=torch.bfloat16).expand(2**25, 2**25)  # has no copy in float32
        module.large = nn.Parameter(large, requires_grad=False)
    assert [site.name for site in find_attention_sites(model)] == ["0"]


class Named(nn.Module):
    """A model whose names resemble those of attention to another sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.crossformer = nn.ModuleList([Nano()])
        self.multihead_attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.crossformer[0](x)
        return self.multihead_attn(x, x, x, need_weights=False)[0]


def test_names_that_resemble_cross_attention_are_found() -> None:
    assert [site.name for site in find_attention_sites(Named())] == ["crossformer.0", "multihead_attn"]


class Gated(nn.Module):
    """A block with a softmax and a matmul of its own, around an attention module."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.gate = Nano(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x) @ self.gate(x).mean((0, 1), keepdim=True).softmax(-1).mT


def test_a_block_has_the_site_of_its_attention() -> None:
    assert [site.name for site in find_attention_sites(nn.Sequential(Gated()))] == ["0.attention"]


class Replacing(Attention):
    """Puts zeros in the place of some scores, which hides nothing."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.merge((q @ k.mT).masked_fill(self.hidden(x), 0.0).softmax(-1) @ v)


class Doubled(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.merge(torch.add(q @ k.mT, self.table, alpha=2).softmax(-1) @ v)


@pytest.mark.parametrize("form", [Replacing, Doubled], ids=lambda each: each.__name__)
def test_operations_that_cores_cannot_repeat_are_refused(form: type[Attention]) -> None:
    model = nn.Sequential(form())
    WindowAttention(window=64, block=4).model(model)
    with pytest.raises(RefusedError, match=r"was not recognized: its scores pass (masked_fill|add)"):
        model(inputs())


class SlicedBias(Attention):
    """Adds a bias to a slice of the scores, as MViTv2 of torchvision does."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        scores = q @ k.mT
        scores[..., 1:, 1:] += self.table[..., 1 : x.shape[1], 1 : x.shape[1]]
        return self.merge(scores.softmax(-1) @ v)


class ViewedBias(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        scores = q @ k.mT
        scores.narrow(-1, 0, 1).add_(1.0)
        return self.merge(scores.softmax(-1) @ v)


class RescaledWeights(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        weights = (q @ k.mT).softmax(-1)
        weights *= self.slopes[:, None, None].detach()
        return self.merge(weights @ v)


class SlicedWeights(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        weights = (q @ k.mT).softmax(-1)
        weights.narrow(-1, 0, 1).zero_()
        return self.merge(weights @ v)


WRITERS: dict[type[Attention], str] = {
    SlicedBias: "its scores pass an in-place write to a slice",
    ViewedBias: "its scores pass an in-place write to a slice",
    RescaledWeights: "its weights pass (__imul__|mul_)",
    SlicedWeights: "its weights pass an in-place write to a slice",
}


@pytest.mark.parametrize("form", WRITERS, ids=lambda each: each.__name__)
def test_in_place_writes_that_hide_nothing_are_refused(form: type[Attention]) -> None:
    model = nn.Sequential(form())
    WindowAttention(window=64, block=4).model(model)
    with pytest.raises(RefusedError, match=f"was not recognized: {WRITERS[form]}"):
        model(inputs())


def test_a_written_slice_is_refused_in_inference_mode() -> None:
    model = nn.Sequential(SlicedBias())
    WindowAttention(window=64, block=4).model(model)
    with torch.inference_mode(), pytest.raises(RefusedError, match="an in-place write to a slice"):
        model(inputs())


class TalkingHeads(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        scores = torch.tanh(q @ k.mT)
        return self.merge(scores.softmax(-1) @ v)


class Copied(Attention):
    """Scores that reach the softmax through an operation without a result of the same kind."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        scores = torch.stack([each for each in (q @ k.mT).unbind(1)], 1)
        return self.merge(scores.softmax(-1) @ v)


class Router(nn.Module):
    """A mixture of experts: a softmax and matmuls, but no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 3), nn.Parameter(torch.randn(3, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)  # (b, t, e)
        each = torch.bmm(x.flatten(0, 1).expand(3, -1, -1), self.experts)
        return torch.einsum("bte,etd->btd", weights, F.gelu(each)[:, : x.shape[1]])


def test_unusual_scores_are_refused_with_the_reason() -> None:
    model = nn.Sequential(TalkingHeads())
    WindowAttention(window=3, block=4).model(model)
    with pytest.raises(RefusedError, match="the attention of 0 was not recognized: its scores pass tanh"):
        model(inputs())


def test_lost_scores_are_refused() -> None:
    model = nn.Sequential(Copied())
    WindowAttention(window=3, block=4).model(model)
    with pytest.raises(RefusedError, match="the attention of 0 was not recognized: its scores pass other operations"):
        model(inputs())


def test_a_softmax_that_is_no_attention_is_left_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Nano(), Router())
    x, router = inputs(), model[1]
    with collect_notes() as notes:
        assert [site.name for site in find_attention_sites(model)] == ["0"]
    assert notes == ["left out, because a call showed no attention between all tokens: 1"]
    WindowAttention(window=64, block=4).model(model)
    plain = nn.Sequential(Nano())
    plain[0].load_state_dict(model[0].state_dict())
    torch.testing.assert_close(model(x), router(plain(x)), rtol=1e-4, atol=1e-5)


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(RefusedError, match="no self-attention was found in Sequential"):
        find_attention_sites(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(RefusedError, match="no self-attention was found in Sequential"):
        find_attention_sites(nn.Sequential(Router()))


def test_fused_encoder_layers_call_the_core_in_evaluation() -> None:
    layer = TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True).eval()
    with torch.no_grad():
        plain = layer(inputs())
        called = count_calls(layer, WindowAttention(window=64, block=4))
        torch.testing.assert_close(layer(inputs()), plain, rtol=1e-4, atol=1e-5)
    assert called == ["self_attn"]


def test_cores_may_lack_options_that_have_no_effect() -> None:
    q = torch.randn(1, 2, 3, 4)
    assert torch.equal(call_core(lambda q, k, v: v, q, q, q), q)
    assert torch.equal(call_core(lambda q, k, v, mask: v, q, q, q, torch.ones(1, 1, 3, 3, dtype=torch.bool)), q)


def test_a_watch_receives_mask_and_bias() -> None:
    q, mask, bias = torch.randn(1, 2, 3, 4), torch.ones(1, 1, 3, 3, dtype=torch.bool), torch.zeros(1, 1, 3, 3)
    core, seen = SwappableCore(lambda q, k, v, mask, bias: v), []
    core.watch = lambda *call: seen.extend(call)
    core(q, q, q, mask, bias=bias)
    assert seen[2] is mask and seen[3] is bias
