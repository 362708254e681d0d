"""Work of a step: closed forms against papers' formulas, and traced models against closed forms and real passes."""

import time
from collections.abc import Callable
from dataclasses import replace

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thrifty.core.errors import RefusedError
from thrifty.core.tensor_tracing import StepTrace
from thrifty.models.families import assemble
from thrifty.models.model_config import ModelConfig
from thrifty.models.model_presets import PRESETS
from thrifty.models.transformer import initialize
from thrifty.simulators.cluster.closed_form_workload import DecoderSizes, transformer
from thrifty.simulators.cluster.gpu_op_forms import use_gpu_ops
from thrifty.simulators.cluster.published_runs import gpt
from thrifty.simulators.cluster.traced_workload import cross_entropy, trace_workload
from thrifty.simulators.cluster.workload import DividedAmount, Recompute, Workload, WorkloadPart

S, H, A, T = 2048, 12_288, 96, 8
"""Tokens, width, heads and tensor ranks of GPT-3, in the notation of Korthikanti et al. 2022."""


@pytest.mark.parametrize(
    ("recompute", "tensor", "sequence_parallel", "expected"),
    [
        ("none", 1, False, 34 + 5 * A * S / H),
        ("none", T, False, 10 + 24 / T + 5 * A * S / H / T),
        ("none", T, True, 34 / T + 5 * A * S / H / T),
        ("selective", T, False, 10 + 24 / T),
        ("selective", T, True, 34 / T),
        ("every", T, False, 2),
    ],
)
def test_block_activations_of_korthikanti_2022_table_2(
    recompute: Recompute, tensor: int, sequence_parallel: bool, expected: float
) -> None:
    block = transformer("gpt3", gpt(96, H, A)).blocks[0]
    assert block.saved_with(recompute).per_rank(tensor, sequence_parallel) == pytest.approx(S * H * expected, rel=1e-12)


@pytest.mark.parametrize(("depth", "width", "heads"), [(24, 2304, 24), (96, 12_288, 96), (128, 25_600, 160)])
def test_flops_and_parameters_of_narayanan_2021(depth: int, width: int, heads: int) -> None:
    workload, vocabulary, examples = transformer("gpt", gpt(depth, width, heads)), 51_200, 1536
    flops = 96 * examples * S * depth * width**2 * (1 + S / (6 * width) + vocabulary / (16 * depth * width))
    assert examples * workload.hardware_flops("every") == pytest.approx(flops, rel=1e-12)
    parameters = 12 * depth * width**2 * (1 + 13 / (12 * width) + (vocabulary + S) / (12 * depth * width))
    assert workload.parameters == pytest.approx(parameters, rel=1e-5)  # the formula omits the last norm
    assert workload.parameters == pytest.approx(parameters + 2 * width, rel=1e-14)


def test_recomputed_work_is_counted_twice() -> None:
    workload = transformer("gpt3", gpt(96, H, A))
    per_block = 24 * S * H**2 + 4 * S**2 * H
    assert workload.hardware_flops("none") == workload.model_flops
    assert workload.hardware_flops("every") - workload.model_flops == pytest.approx(96 * per_block)
    assert workload.hardware_flops("selective") - workload.model_flops == pytest.approx(96 * 2 * S**2 * H)


def shape(style: str, depth: int = 3) -> ModelConfig:
    kv_heads, hidden = (4, 1408) if style == "llama" else (8, 2048)
    return ModelConfig(style, depth, 512, 8, kv_heads, hidden, 1000, 256, tied=style == "gpt")  # pyrefly: ignore


def sizes(given: ModelConfig, flash: bool) -> DecoderSizes:
    gated = given.style == "llama"
    return DecoderSizes(
        given.depth,
        given.width,
        given.heads,
        given.length,
        given.vocabulary,
        given.kv_heads,
        given.hidden,
        gated,
        given.tied,
        flash=flash,
    )


def near(result: DividedAmount, expected: DividedAmount, share: float) -> bool:
    return all(
        abs(mine - theirs) <= share * expected.total
        for mine, theirs in ((result.split, expected.split), (result.whole, expected.whole))
    )


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("style", ["gpt", "llama"])
def test_traced_models_equal_the_closed_form(style: str, flash: bool) -> None:
    given = shape(style)
    result = trace_workload(style, lambda: assemble(given), given.length, flash=flash)
    expected = transformer(style, sizes(given, flash))
    assert result.parameters == expected.parameters and result.shared == expected.shared
    assert len(result.blocks) == given.depth and result.itemsize == expected.itemsize
    assert result.model_flops == expected.model_flops
    mine, theirs = result.blocks[0], expected.blocks[0]
    for passes in ("forward", "backward"):
        assert getattr(mine, passes).flops == getattr(theirs, passes).flops
        assert getattr(mine, passes).reduces == getattr(theirs, passes).reduces == 2
        assert getattr(mine, passes).reduced == getattr(theirs, passes).reduced
        # rotary positions are several operations, but the formula counts one
        assert near(getattr(mine, passes).moved, getattr(theirs, passes).moved, 0.10 if style == "gpt" else 0.15)
    assert mine.for_weights == theirs.for_weights and mine.entry == theirs.entry
    assert mine.core.flops == theirs.core.flops
    # rotated q and k are saved in addition to the product of which v is a view
    assert near(mine.saved, theirs.saved, 0.02 if style == "gpt" else 0.12)
    assert near(mine.core_saved, theirs.core_saved, 0.01)
    for part in ("embedding", "head"):
        mine, theirs = getattr(result, part), getattr(expected, part)
        assert mine.forward.flops == theirs.forward.flops and mine.backward.flops == theirs.backward.flops
        assert (mine.forward.reduces, mine.backward.reduces) == (theirs.forward.reduces, theirs.backward.reduces)
    assert near(result.head.saved, expected.head.saved, 0.03)
    assert near(result.head.forward.moved, expected.head.forward.moved, 0.03)


class Encoders(nn.Module):
    """A model of torch's own encoder layers, with dropout."""

    def __init__(self, depth: int, width: int, heads: int, vocabulary: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.1, activation=F.gelu, batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        for layer in self.layers:
            layer.dropout = nn.Identity()  # GPT has no dropout inside its feed-forward network
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_activations_of_torch_encoder_layers() -> None:
    """Bytes that autograd saves in torch's encoder layer equal s·b·h·(34 + 5·a·s/h) (Korthikanti et al. 2022,
    equation 1)."""
    width, heads, length = 512, 8, 384
    result = trace_workload("encoders", lambda: Encoders(2, width, heads, 1000), length, flash=False).blocks[0]
    stream = length * width
    assert result.saved.total == pytest.approx(stream * (34 + 5 * heads * length / width), rel=0.01)
    assert result.saved_with("selective").total == pytest.approx(stream * 34, rel=0.01)
    assert result.saved.whole == pytest.approx(stream * 10, rel=0.01)
    assert result.saved_with("every").total == stream * 2
    assert result.forward.reduces == result.backward.reduces == 2


def full_count(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> int:
    """Return the FLOPs of a real step of the whole model."""
    with StepTrace(*model.parameters()) as trace:
        loss(model).backward()
    return trace.flops


@pytest.mark.parametrize("name", ["gpt-nano", "llama-nano", "bert-nano", "t5-nano", "marian-nano"])
def test_flops_of_every_style_equal_a_full_pass(name: str) -> None:
    """One block of each kind is traced. The real model computes all blocks."""
    length = 64
    given = replace(PRESETS[name], length=128)
    model = assemble(given)
    initialize(model, 0)
    tokens = torch.zeros(1, length, dtype=torch.long)

    def loss(model: nn.Module, tokens: Tensor = tokens) -> Tensor:
        is_pair = model.task == "sequence_to_sequence"
        return cross_entropy(model.logits(tokens, tokens) if is_pair else model.logits(tokens), tokens)  # type: ignore[operator]

    result = trace_workload(name, lambda: assemble(given), length, loss=loss, dtype=torch.float32)
    assert result.parameters == sum(p.numel() for p in model.parameters())
    if name == "t5-nano":  # the CPU kernel has no position bias, so attention computes the scores itself
        assert result.model_flops == pytest.approx(full_count(model, loss), rel=0.02)
    else:
        assert result.model_flops == full_count(model, loss)


def test_blocks_of_several_kinds_are_traced() -> None:
    def build() -> nn.Module:
        model = Encoders(4, 128, 4, 500)
        for layer in list(model.layers)[::2]:
            layer.linear1, layer.linear2 = nn.Linear(128, 64), nn.Linear(64, 128)  # type: ignore[assignment]
        return model

    result = trace_workload("mixed", build, 64)
    even, odd = result.blocks[0], result.blocks[1]
    assert result.blocks == (even, odd, even, odd) and even.forward.flops.total < odd.forward.flops.total
    tokens = torch.zeros(1, 64, dtype=torch.long)
    with use_gpu_ops(flash=True):
        assert result.model_flops == full_count(build(), lambda model: cross_entropy(model(tokens), tokens))


def test_repeated_blocks_share_their_parameters() -> None:
    def build() -> nn.Module:
        model = Encoders(3, 64, 2, 100)
        model.layers[2] = model.layers[1]
        return model

    result = trace_workload("shared", build, 32)
    assert result.parameters == sum(p.numel() for p in build().parameters())
    assert [block.parameters.total > 0 for block in result.blocks] == [True, True, False]
    assert result.blocks[2].forward == result.blocks[1].forward


@pytest.mark.parametrize("kind", ["GPT2", "Qwen3"])
def test_transformers_models_are_split_as_in_megatron(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    few = {"GPT2": {"n_layer": 3, "n_embd": 128, "n_head": 4, "vocab_size": 500}}.get(
        kind,
        {
            "num_hidden_layers": 3,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "vocab_size": 500,
        },
    )
    config = getattr(transformers, f"{kind}Config")(**few, use_cache=False)
    build = transformers.AutoModelForCausalLM.from_config
    result = trace_workload(kind, lambda: build(config), 64)
    assert result.parameters == sum(p.numel() for p in build(config).parameters())
    block = result.blocks[0]
    assert len(result.blocks) == 3 and block.forward.reduces == block.backward.reduces == 2
    assert (
        block.forward.flops.whole == 0
        and block.core == WorkloadPart("", DividedAmount(), block.core, block.core, DividedAmount(), 0).core
    )
    assert block.forward.flops.total == pytest.approx(2 * 64 * block.parameters.split, rel=0.15)  # and attention


def test_trillion_parameter_models_take_seconds_and_no_memory() -> None:
    given = ModelConfig("gpt", 128, 25_600, 160, 160, 4 * 25_600, 51_200, 2048, tied=True)
    trace_workload("warm", lambda: assemble(shape("gpt")), 64)
    process, began = psutil.Process(), time.process_time()
    before = process.memory_info().rss
    result = trace_workload("1t", lambda: assemble(given), 2048)
    assert result.parameters == pytest.approx(1.008e12, rel=1e-3)
    assert time.process_time() - began < 5
    assert process.memory_info().rss - before < 500e6


def test_models_without_blocks_are_refused() -> None:
    with pytest.raises(RefusedError, match="no list of equal blocks"):
        trace_workload("linear", lambda: nn.Linear(4, 4), 8)


def test_amounts_are_divided_per_rank() -> None:
    amount = DividedAmount(split=80, whole=8)
    assert amount.per_rank(1) == 88 and amount.per_rank(8) == 18 and amount.per_rank(8, True) == 11
    assert (amount + amount).total == (amount * 2).total == 176


def test_parts_of_a_workload() -> None:
    workload: Workload = transformer("gpt", gpt(3, 64, 2))
    assert [part.name for part in workload.parts] == ["embedding", "block", "block", "block", "head"]
    assert (
        workload.head.recomputed("every").flops.total == 0 and workload.head.saved_with("every") == workload.head.saved
    )
