"""Traces record queries, keys, values and kept pairs of a model, for each kind of attention core."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import Tensor, nn

from thrifty.cli.trace import command
from thrifty.core.errors import RefusedError, UsageError
from thrifty.kernels.attention_filters.keep_masks import core_weights
from thrifty.kernels.tiled_attention import causal_attention_reference, tiled_attention
from thrifty.models.attention_layers import Attention, full_attention
from thrifty.simulators.accelerator.synthetic_traces import PATTERNS
from thrifty.simulators.accelerator.trace_file import load_trace
from thrifty.simulators.accelerator.trace_recorder import record_attention
from thrifty.techniques.attention.window import WindowAttention

TOKENS = 12


class Small(nn.Module):
    """A model of one attention layer."""

    def __init__(self, core=causal_attention_reference, heads: int = 4, kv_heads: int = 2):
        super().__init__()
        torch.manual_seed(0)
        self.attention = Attention(32, heads, kv_heads, core=core)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.attention(x, mask)


def vectors(examples: int = 2, tokens: int = TOKENS) -> Tensor:
    return torch.randn(examples, tokens, 32, generator=torch.Generator().manual_seed(1))


def tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return tiled_attention(q, k, v, tile=4)


@pytest.mark.parametrize("core", [causal_attention_reference, tiled])
def test_recorded_operands_and_causality(core) -> None:
    model, x = Small(core), vectors()
    (layer,) = record_attention(model, [x]).layers
    q, k, v = model.attention.qkv(x).unflatten(-1, (8, 8)).transpose(1, 2).split([4, 2, 2], dim=1)
    assert layer.name == "attention" and (layer.examples, layer.heads, layer.width, layer.bits) == (2, 4, 8, 32)
    np.testing.assert_array_equal(layer.q, q.detach())
    np.testing.assert_array_equal(layer.k, k.repeat_interleave(2, 1).detach())
    np.testing.assert_array_equal(layer.v, v.repeat_interleave(2, 1).detach())
    assert np.array_equal(layer.kept(), np.broadcast_to(np.tri(TOKENS, dtype=bool), (8, TOKENS, TOKENS)))


@pytest.mark.parametrize("as_module", [False, True])
def test_recorded_pairs_of_a_sparse_core(as_module: bool) -> None:
    def strided(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place = torch.arange(q.shape[2])
        kept = ((place[:, None] - place) % 3 == 0) & (place <= place[:, None])
        scores = (q @ k.mT).masked_fill(~kept, float("-inf"))
        return scores.softmax(-1) @ v

    class Strided(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return strided(q, k, v)

    model = Small(Strided() if as_module else strided, kv_heads=4)
    (layer,) = record_attention(model, [vectors()]).layers
    assert "forward" not in vars(model.attention.core) if as_module else model.attention.core is strided
    place = np.arange(TOKENS)
    expected = ((place[:, None] - place) % 3 == 0) & (place <= place[:, None])
    assert (layer.kept() == expected).all()


@pytest.mark.parametrize("keys", [5, 8, 19])
def test_unit_vectors_as_values_output_probabilities(keys: int) -> None:
    q, k = torch.randn(2, 3, 7, 8), torch.randn(2, 3, keys, 8)
    result = core_weights(full_attention, q, k)
    torch.testing.assert_close(result, (q @ k.mT / 8**0.5).softmax(-1))


def test_trailing_unseen_keys_are_padding() -> None:
    keep = torch.ones(2, 1, 1, TOKENS, dtype=torch.bool)
    keep[1, ..., 8:] = False
    model = Small(full_attention, kv_heads=4)
    trace = record_attention(model, [(vectors(), keep), (vectors(1, 5), None)], lambda model, given: model(*given))
    (layer,) = trace.layers
    assert layer.query_lengths.tolist() == layer.key_lengths.tolist() == [12, 8, 5]
    assert layer.density == 1.0 and (layer.examples, layer.queries) == (3, 12)
    added = torch.zeros(2, 1, 1, TOKENS).masked_fill(~keep, float("-inf"))
    again = record_attention(model, [(vectors(), added)], lambda model, given: model(*given)).layers[0]
    assert again.key_lengths.tolist() == [12, 8]


def test_recording_leaves_the_model_unchanged() -> None:
    model = Small().train()
    core, x = model.attention.core, vectors()
    before = model(x)

    def fail(model: nn.Module, batch: Tensor) -> None:
        model(batch)
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        record_attention(model, [x], fail)
    record_attention(model, [x])
    assert model.training and model.attention.core is core
    assert not model.attention._forward_hooks and not model.attention._forward_pre_hooks
    assert torch.equal(model(x), before)


def test_models_without_attention_are_refused() -> None:
    with pytest.raises(RefusedError, match="sdpa"):
        record_attention(nn.Linear(32, 32), [vectors()])


def hugging_face(attention: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, attn_implementation=attention,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def test_recorded_transformers_models() -> None:
    tokens = torch.arange(2 * TOKENS).reshape(2, TOKENS)
    trace = record_attention(hugging_face("sdpa"), [tokens])
    assert [layer.name for layer in trace.layers] == [f"model.layers.{n}.self_attn" for n in range(2)]
    for layer in trace.layers:
        assert (layer.kept() == np.tri(TOKENS, dtype=bool)).all() and layer.k is not None and layer.k.shape[1] == 4
    with pytest.raises(RefusedError, match="sdpa"):
        record_attention(hugging_face("eager"), [tokens])


def test_recorded_operands_reproduce_the_output() -> None:
    """Attention computed from the trace equals the model's output."""
    seen = {}
    model, x = Small(), vectors()
    model.attention.out.register_forward_pre_hook(lambda module, given: seen.update(out=given[0]))
    (layer,) = record_attention(model, [x]).layers
    q, k, v = (torch.from_numpy(part) for part in (layer.q, layer.k, layer.v))
    kept = torch.from_numpy(layer.kept()).view(2, 4, TOKENS, TOKENS)
    output = F.scaled_dot_product_attention(q, k, v, kept).transpose(1, 2).flatten(2)
    torch.testing.assert_close(output, seen["out"])


def printed(tmp_path: Path, *words: object) -> tuple[str, Path]:
    out = tmp_path / "t.safetensors"
    out.unlink(missing_ok=True)
    words = (*map(str, words), "--out", str(out))
    result = CliRunner().invoke(command, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    with pytest.raises(UsageError, match="exists already"):
        CliRunner().invoke(command, words, catch_exceptions=False)
    return result.stdout, out


def test_the_command_writes_presets_patterns_and_masks(tmp_path: Path) -> None:
    page, out = printed(tmp_path, "gpt-nano", "--length", 16, "--dtype", "float16")
    assert "4 layers, 32 (example, head) pairs, 16 x 16 tokens, head width 32" in page
    trace = load_trace(out)
    assert trace.provenance["data"] == "random" and trace.layers[0].q.dtype == np.float16
    page, out = printed(tmp_path, "power-law", "--density", 0.25, "--layers", 2, "--heads", 3, "--length", 64)
    assert "2 layers, 12 (example, head) pairs" in page and load_trace(out).density == pytest.approx(0.25, abs=0.02)
    np.save(tmp_path / "m.npy", np.zeros((2, 3, 9, 9), bool))
    assert "9 x 9 tokens" in printed(tmp_path, tmp_path / "m.npy")[0]


def test_the_command_records_encoder_decoder_attention(tmp_path: Path) -> None:
    names = [layer.name for layer in load_trace(printed(tmp_path, "t5-nano", "--length", 8)[1]).layers]
    assert len(names) == 6 and sum("cross" in name for name in names) == 2


@pytest.mark.parametrize(
    ("source", "message"), [("gpt-nan", "did you mean 'gpt-nano'"), ("powerlaw", "did you mean 'power-law'")]
)
def test_the_command_suggests_similar_names(source: str, message: str) -> None:
    assert "power-law" in PATTERNS
    with pytest.raises(UsageError, match=message):
        CliRunner().invoke(command, [source], catch_exceptions=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("least", [-10000.0, -1e9, float("-inf")])
def test_additive_masks_hide_pairs_and_biases_do_not(least: float, dtype) -> None:
    bias = -0.5 * torch.arange(TOKENS)[None, :].expand(TOKENS, -1)
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    (layer,) = record_attention(
        Small(full_attention).to(dtype),
        [vectors().to(dtype)],
        lambda model, x: model(x, bias.masked_fill(hidden, least).to(dtype)[None, None]),
    ).layers
    assert np.array_equal(layer.kept(), np.broadcast_to(np.tri(TOKENS, dtype=bool), (8, TOKENS, TOKENS)))


def test_recording_preserves_the_relay_of_a_core() -> None:
    class Handing:
        """A core that keeps one more key at each call within a pass."""

        def __init__(self, relay: SimpleNamespace):
            self.relay = relay

        def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.relay.standing = (self.relay.standing or 0) + 1
            kept = torch.arange(k.shape[2]) < self.relay.standing
            return (q @ k.mT).masked_fill(~kept, float("-inf")).softmax(-1) @ v

    relay = SimpleNamespace(standing=None)
    model = nn.Sequential(*(Small(Handing(relay), 4, 4) for _ in range(3)))
    trace = record_attention(model, [vectors()])
    assert [layer.kept_counts.max() for layer in trace.layers] == [1, 2, 3] and relay.standing == 3


def test_recorded_cores_of_transformers_models() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "num_hidden_layers": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=300)).eval()
    model = WindowAttention(window=3, block=4).model(model)
    trace = record_attention(model, [torch.arange(10)[None]])
    assert [layer.name for layer in trace.layers] == [f"model.layers.{i}.self_attn" for i in range(2)]
    assert trace.layers[0].kept_counts[0].tolist() == [1, 2, *[3] * 8]
