"""Predicted footprints against the allocator's own events, for models x techniques.

Each technique there is, and some together, run on one of the models in turn (`make test` has a sample of these);
`benchmarks/bench_footprints.py` runs all
on each.
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
    "sparsity.early_bird": {"latest": STEPS},  # what is predicted is the search, with the whole model
    "sparsity.mask_from_file": {"file": "", "sha256": ""},  # the tests' ticket is of a smaller model
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
"""What refuses the GPT-NeoX: attention with dropout, heads that cannot be told apart."""
APART = {
    "attention.a3": "its search looks at values, and what it holds on the way is not in a footprint",
    "attention.spatten": "what its blocks hand on stays until the next forward pass, and is not in a footprint",
    "attention.vitcod": "one pair stands for all masks where work is counted, since they are found in the run",
    "data_selection.prune": "beside the model it holds a number for each example that is kept",
}
CHOSEN = [*((name,) for name in techniques.names() if name not in {*RUNS, *APART}), *TOGETHER]
ON = {"sparsity.snip": "llama"}
"""Where the model does not follow from the place: the step that takes SNIP's scores needs 11 % more on the GPT."""


def model_for(place: int, names: tuple[str, ...]) -> str:
    return ON.get(names[0], MODELS[place % (2 if OF_OURS & {*names} else len(MODELS))])


GRID = sample_of([(model_for(place, names), names) for place, names in enumerate(CHOSEN)], 4)


def plain_run(style: str, width: int = WIDTH, vocabulary: int = VOCABULARY, length: int = LENGTH) -> BaseRun:
    """In proportion as real ones: activations outweigh weights, unless told otherwise."""

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
    """As users bring it: a head of its own, and dropout."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": 4}
    torch.manual_seed(0)
    shape = transformers.GPTNeoXConfig(
        **sizes, vocab_size=VOCABULARY, max_position_embeddings=LENGTH + ROOM, hidden_dropout=0.1, attention_dropout=0.1
    )
    with unset_fake_temporarily():  # it is tried out, with values, when it is wrapped
        return HuggingFaceCausalLM(transformers.GPTNeoXForCausalLM(shape))


@pytest.fixture(autouse=True)
def alone(one_rank: None) -> Iterator[None]:
    """One rank, for techniques that ask for several; nothing compiled before, nothing old for the cycle collector."""
    torch._dynamo.reset()
    gc.freeze()
    yield
    gc.unfreeze()


@cache
def both(model: str, names: tuple[str, ...]) -> tuple[Footprint, AllocationReport]:
    chosen = [technique(name, **SETTINGS.get(name, {})) for name in names]
    run = compose(plain_run(model), with_optimizer(chosen), STEPS)
    return explain(run).footprint, measure_allocations(run)


def error(predicted: Footprint, measured: AllocationReport) -> float:
    return abs(predicted.memory / measured.peak - 1)


@pytest.mark.parametrize(("model", "names"), GRID)
def test_states_are_predicted_to_the_byte_and_the_peak_nearly(model: str, names: tuple[str, ...]) -> None:
    predicted, measured = both(model, names)
    assert predicted.parameters == measured.parameters
    assert predicted.gradients == measured.gradients
    assert predicted.optimizer == measured.optimizer
    assert error(predicted, measured) <= LARGEST_ERROR
    held = predicted.parameters + predicted.optimizer + predicted.buffers
    # what stands beside them is the memory of a backward pass: a few numbers
    assert held <= measured.standing[-1] <= held + 2048


def test_the_median_error_of_the_predicted_peak_is_far_below_a_twentieth() -> None:
    assert median(error(*both(*case)) for case in GRID) <= LARGEST_MEDIAN


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name", ["optimizers.adamw", "optimizers.soap", "sparsity.rigl", "adapters.intrinsic_dimension"]
)
def test_where_weights_outweigh_activations_gradients_and_the_update_make_the_peak(name: str) -> None:
    run = compose(plain_run("llama", vocabulary=1024, length=4), with_optimizer([technique(name)]), STEPS)
    predicted, measured = explain(run).footprint, measure_allocations(run)
    assert predicted.activations < predicted.parameters
    assert error(predicted, measured) <= LARGEST_ERROR


def test_a_step_with_the_gate_of_sampling_open_holds_what_was_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = with_optimizer([technique("data_selection.gradient_norm_sampling")])
    run = compose(plain_run("gpt"), chosen, STEPS)
    predicted = explain(run).footprint
    monkeypatch.setattr(gradient_norm_sampling, "variance_reduction", lambda scores: torch.tensor(1000.0))
    measured = measure_allocations(run)
    assert float(run.memories["data_selection.gradient_norm_sampling"]["tau"]) > 2
    assert error(predicted, measured) <= LARGEST_ERROR


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", ["Qwen3", "Mistral", "Mixtral", "Gemma", "StableLm", "Olmo2"])
def test_decoders_that_make_their_masks_themselves_take_the_branch_of_the_run(family: str) -> None:
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
def test_masked_language_models_hold_their_logits_as_often_as_predicted(family: str, names: tuple[str, ...]) -> None:
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


def test_the_measurement_sees_what_is_held_and_what_is_given_back() -> None:
    """By hand: weights of 128 x 256 bytes four times, the batch, and nothing that was freed before the step."""
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
