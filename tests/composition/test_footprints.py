"""Predicted footprints compared with the allocator's events, for models and techniques.

Techniques and some combinations are distributed over the models. `make test` runs a sample.
`benchmarks/bench_footprints.py` runs all techniques on each model.
"""

import gc
from collections.abc import Iterator
from functools import cache
from statistics import median
from typing import Any

import pytest
import torch
import transformers
from benchmarks.allocator_trace import AllocationReport, measure_allocations
from table_samples import sample_of
from technique_runs import RUNS
from tiny_runs import ROOM, VOCABULARY, corpus, technique, with_optimizer
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from thrifty import techniques
from thrifty.composition.compose import BaseRun, compose
from thrifty.composition.explain import explain, passes_of
from thrifty.core.footprint import Footprint
from thrifty.data.text.token_windows import PackedTokens
from thrifty.models.families import assemble
from thrifty.models.hf_wrapper import HuggingFaceCausalLM, HuggingFaceMaskedLM
from thrifty.models.model_config import ModelConfig
from thrifty.models.transformer import initialize
from thrifty.objectives.masked_token import MaskedToken
from thrifty.objectives.next_token import NextToken
from thrifty.techniques.data_selection import gradient_norm_sampling

DEPTH, WIDTH, LENGTH, BATCH, STEPS = 2, 128, 64, 8, 5
LARGEST_ERROR, LARGEST_MEDIAN = 0.05, 0.001
SETTINGS: dict[str, dict[str, Any]] = {
    "sparsity.early_bird": {"latest": STEPS},  # the prediction is for the search, with the whole model
    "sparsity.mask_from_file": {"file": "", "sha256": ""},  # the tests' mask file belongs to a smaller model
}
MODELS = ("gpt", "llama", "gpt_neox")
TOGETHER = (
    ("precision.mixed", "memory.recompute", "adapters.lora", "large_batch.gradient_accumulation"),
    ("memory.compress_activations", "optimizers.muon", "precision.optimizer_state"),
    ("memory.share_parameters", "precision.bfloat16_weights", "gradients.clip"),
)
OF_OURS = {name for name in techniques.names() if name.startswith("attention.")} | {
    "sparsity.dynamic_heads",
    "sparsity.early_bird",
}
"""Techniques that refuse the GPT-NeoX, because it has attention dropout or heads that cannot be separated."""
APART = {
    "attention.a3": "its search reads values, and its temporary memory is not in a footprint",
    "attention.spatten": "its blocks' scores stay until the next forward pass, and are not in a footprint",
    "attention.vitcod": "masks are found during the run; the count uses one pair as a placeholder",
    "data_selection.prune": "it stores one number per selected example in addition to the model",
}
CHOSEN = [*((name,) for name in techniques.names() if name not in {*RUNS, *APART}), *TOGETHER]
ON = {"sparsity.snip": "llama"}
"""Models of techniques that cannot use the model of their table position. On the GPT, SNIP's scoring step takes 11 %
more.
"""


def model_for(place: int, names: tuple[str, ...]) -> str:
    return ON.get(names[0], MODELS[place % (2 if OF_OURS & {*names} else len(MODELS))])


GRID = sample_of([(model_for(place, names), names) for place, names in enumerate(CHOSEN)], 4)


def plain_run(style: str, width: int = WIDTH, vocabulary: int = VOCABULARY, length: int = LENGTH) -> BaseRun:
    """Return a run in which activations are larger than weights by default, as in real runs."""

    def build() -> nn.Module:
        if style == "gpt_neox":
            return gpt_neox()
        kv_heads, hidden = (2, 3 * width) if style == "llama" else (4, 4 * width)
        shape: Any = (style, DEPTH, width, 4, kv_heads, hidden, vocabulary, length + ROOM, True)
        model = assemble(ModelConfig(*shape))
        initialize(model, 0)
        return model

    return BaseRun(build, PackedTokens(corpus(), length, BATCH, seed=0), NextToken())


def gpt_neox() -> nn.Module:
    """Return a GPT-NeoX with an untied head and dropout, as users bring it."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": 4}
    torch.manual_seed(0)
    shape = transformers.GPTNeoXConfig(
        **sizes, vocab_size=VOCABULARY, max_position_embeddings=LENGTH + ROOM, hidden_dropout=0.1, attention_dropout=0.1
    )
    with unset_fake_temporarily():  # wrapping runs the model on real values
        return HuggingFaceCausalLM(transformers.GPTNeoXForCausalLM(shape))


@pytest.fixture(autouse=True)
def alone(one_rank: None) -> Iterator[None]:
    """Set up one rank for techniques that require several ranks, without compiled code and collectable garbage."""
    torch._dynamo.reset()
    gc.freeze()
    yield
    gc.unfreeze()


@cache
def predicted_and_measured(model: str, names: tuple[str, ...]) -> tuple[Footprint, AllocationReport]:
    chosen = [technique(name, **SETTINGS.get(name, {})) for name in names]
    run = compose(plain_run(model), with_optimizer(chosen), STEPS)
    return explain(run).footprint, measure_allocations(run)


def error(predicted: Footprint, measured: AllocationReport) -> float:
    return abs(predicted.memory / measured.peak - 1)


@pytest.mark.parametrize(("model", "names"), GRID)
def test_state_bytes_are_exact_and_peak_is_close(model: str, names: tuple[str, ...]) -> None:
    predicted, measured = predicted_and_measured(model, names)
    assert predicted.parameters == measured.parameters
    assert predicted.gradients == measured.gradients
    assert predicted.optimizer == measured.optimizer
    assert error(predicted, measured) <= LARGEST_ERROR
    resident = predicted.parameters + predicted.optimizer + predicted.buffers
    # the rest is the state of a backward pass: a few values
    assert resident <= measured.standing[-1] <= resident + 2048


def test_median_error_of_the_predicted_peak() -> None:
    assert median(error(*predicted_and_measured(*case)) for case in GRID) <= LARGEST_MEDIAN


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name", ["optimizers.adamw", "optimizers.soap", "sparsity.rigl", "adapters.intrinsic_dimension"]
)
def test_peak_of_gradients_and_update_for_large_weights(name: str) -> None:
    run = compose(plain_run("llama", vocabulary=1024, length=4), with_optimizer([technique(name)]), STEPS)
    predicted, measured = explain(run).footprint, measure_allocations(run)
    assert predicted.activations < predicted.parameters
    assert error(predicted, measured) <= LARGEST_ERROR


def test_peak_of_a_step_with_active_importance_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = with_optimizer([technique("data_selection.gradient_norm_sampling")])
    run = compose(plain_run("gpt"), chosen, STEPS)
    predicted = explain(run).footprint
    monkeypatch.setattr(gradient_norm_sampling, "variance_reduction", lambda scores: torch.tensor(1000.0))
    measured = measure_allocations(run)
    assert float(run.memories["data_selection.gradient_norm_sampling"]["tau"]) > 2
    assert error(predicted, measured) <= LARGEST_ERROR


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", ["Qwen3", "Mistral", "Mixtral", "Gemma", "StableLm", "Olmo2"])
def test_transformers_decoders_take_the_mask_branch_of_the_run(family: str) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": DEPTH, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCABULARY}
    config = getattr(transformers, f"{family}Config")(**sizes)

    def build() -> nn.Module:
        torch.manual_seed(0)
        with unset_fake_temporarily():
            return HuggingFaceCausalLM(getattr(transformers, f"{family}ForCausalLM")(config))

    plain = BaseRun(build, PackedTokens(corpus(), LENGTH, BATCH, seed=0), NextToken())
    run = compose(plain, with_optimizer([]), 2)
    predicted, real = explain(run).footprint, passes_of(run, run.source.at(1))
    assert error(predicted, measure_allocations(run)) <= 0.001
    assert predicted.flops == real.flops and predicted.activations == real.activations


@pytest.mark.parametrize(("family", "names"), [("Albert", ()), ("MobileBert", ("precision.mixed",))])
def test_peak_of_masked_language_models(family: str, names: tuple[str, ...]) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": DEPTH, "num_attention_heads": 4}
    sizes |= {"embedding_size": 16, "intra_bottleneck_size": 16, "vocab_size": VOCABULARY}
    config = getattr(transformers, f"{family}Config")(**sizes)
    kind = getattr(transformers, f"{family}ForMaskedLM")

    def build() -> nn.Module:
        torch.manual_seed(0)
        with unset_fake_temporarily():
            return HuggingFaceMaskedLM(kind(config))

    objective = MaskedToken(mask=0, vocabulary=VOCABULARY, special=frozenset({0}))
    plain = BaseRun(build, PackedTokens(corpus(), LENGTH, BATCH, seed=0), objective)
    run = compose(plain, with_optimizer([technique(name) for name in names]), 2)
    assert error(explain(run).footprint, measure_allocations(run)) <= 0.01


def test_measurement_of_resident_and_freed_bytes() -> None:
    """Compare with the formula: four times the weights, the batch, and no bytes freed before the step."""
    run = compose(plain_run("gpt"), [technique("optimizers.adamw")], STEPS)
    measured = measure_allocations(run)
    model = run.build_model()
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert measured.parameters == measured.gradients == size
    assert measured.optimizer == 2 * size
    assert len(measured.peaks) == len(measured.standing) == STEPS
    assert measured.peaks[0] == pytest.approx(measured.peaks[-1], rel=1e-3)
    logits = BATCH * LENGTH * VOCABULARY * 4
    assert measured.peak > measured.standing[-1] + size + logits
