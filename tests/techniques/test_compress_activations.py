"""Compressed activations: exact forward pass, unbiased gradients, exact tensors, memory, adaptive bits."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from parallel_work import STEPS
from tiny_runs import (
    advance,
    assert_same,
    losses,
    plain_run,
    restored,
    run_through,
    snapshot,
    technique,
    with_optimizer,
)
from torch import Tensor, nn

from thrifty.composition.compose import BaseRun, compose
from thrifty.composition.explain import count
from thrifty.composition.step_footprint import CountedPasses
from thrifty.core.backward import Backward, BackwardResult, plain_backward
from thrifty.core.batches import Batch
from thrifty.core.errors import UsageError
from thrifty.core.objective import Objective, Prediction
from thrifty.core.state import read_log
from thrifty.core.tensor_tracing import StepTrace, tensor_bytes
from thrifty.kernels.quantized_tensors import PackedMask, QuantizedTensor
from thrifty.memory.quantized_store import QuantizedStore, few_values
from thrifty.memory.saved_tensor_hooks import use_activation_store
from thrifty.models.families import assemble
from thrifty.models.model_config import ModelConfig
from thrifty.techniques.memory._gradient_sensitivity import sensitivities
from thrifty.techniques.memory.compress_activations import CompressActivations, QuantizingBackward, QuantizingObjective

DRAWS = 2000


class Watching(QuantizedStore):
    """A store that records each tensor and its stored form."""

    def __init__(self, *args, **options):
        super().__init__(*args, **({"smallest": 1} | options))
        self.seen: list[tuple[torch.Size, torch.dtype, object]] = []

    def store(self, activation: Tensor) -> Callable[[], Tensor] | None:
        give = super().store(activation)
        self.seen.append((activation.shape, activation.dtype, getattr(give, "__self__", None)))
        return give

    def exact(self) -> list[tuple[torch.Size, torch.dtype]]:
        return [(shape, dtype) for shape, dtype, coded in self.seen if coded is None]


def small_codes(seed: int, bits: Callable[[int], int] = lambda position: 4) -> QuantizedStore:
    return QuantizedStore(seed, bits, smallest=1)


def gradients_of(model: nn.Module, loss: Callable[[], Tensor], store: QuantizedStore | None) -> list[Tensor]:
    model.zero_grad()
    if store is None:
        value = loss()
    else:
        with use_activation_store(store, smallest=1):
            value = loss()
    value.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def first_run(**settings: object) -> tuple[float, float]:
    """Return the first loss of a run with dropout."""
    plain = plain_run(style="gpt", dropout=0.3)
    runs = ([], [technique("memory.compress_activations", **settings)])
    return tuple(losses(run_through(plain, with_optimizer(chosen), 1)[0])[0] for chosen in runs)  # type: ignore[return-value]


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_forward_pass_is_exact(bits: int) -> None:
    plain, compressed = first_run(bits=bits, min_elements=1)
    assert plain == compressed


@pytest.mark.slow
@pytest.mark.parametrize("bits", [2, 4])
def test_mean_gradient_is_exact(bits: int) -> None:
    """With two layers and a ReLU the gradient is linear in the saved tensors."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    x, y = torch.randn(16, 32), torch.randn(16, 8)

    def loss() -> Tensor:
        return ((net(x) - y) * torch.linspace(-1, 1, 8)).sum()

    exact = gradients_of(net, loss, None)
    total, squares = ([torch.zeros_like(g, dtype=torch.float64) for g in exact] for _ in range(2))
    for seed in range(DRAWS):
        for index, found in enumerate(gradients_of(net, loss, small_codes(seed * 100, lambda position: bits))):
            error = (found - exact[index]).double()
            total[index] += error
            squares[index] += error.square()
    for mean, square in zip(total, squares, strict=True):
        mean, deviation = mean / DRAWS, (square / DRAWS**2).sqrt()
        assert (mean.abs() <= 3 * deviation + 1e-5).double().mean() > 0.99
    assert squares[0].max() > 0 and squares[2].max() > 0


def test_float8_tensors_stay_exact() -> None:
    """Compiled FP8 products save their factors."""
    store = small_codes(0)
    assert store.store(torch.randn(32, 64).to(torch.float8_e4m3fn)) is None
    assert store.store(torch.randn(32, 64)) is not None


def test_scalars_stay_exact() -> None:
    x, scale = torch.randn(8, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    with use_activation_store(small_codes(0), smallest=1):
        loss = (x * scale.exp()).sum()  # saves the exponential
    loss.backward()
    assert torch.equal(x.grad, scale.exp().expand(8))


def test_two_forward_passes_do_not_mix() -> None:
    """Published code stores a reference to running ranges, and so decodes the first pass with ranges of the second."""
    net = nn.Linear(64, 16, bias=False)
    quiet, loud = torch.randn(32, 64), 1000 * torch.randn(32, 64)
    with use_activation_store(small_codes(0), smallest=1):
        first = net(quiet).sum()
    with use_activation_store(small_codes(1), smallest=1):
        second = net(loud).sum()
    (first + 0 * second).backward()
    assert net.weight.grad is not None
    assert (net.weight.grad - quiet.sum(0)).abs().max() < 32 * 0.5


def test_rounding_depends_on_the_pass() -> None:
    net, x = nn.Linear(64, 16), torch.randn(32, 64)
    first, again, other = (gradients_of(net, lambda: net(x).square().sum(), small_codes(seed)) for seed in (7, 7, 8))
    assert torch.equal(first[0], again[0]) and not torch.equal(first[0], other[0])


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("style", ["gpt", "llama"])
def test_statistics_parameters_and_buffers_stay_exact(style: str, autocast: bool) -> None:
    model = assemble(ModelConfig(style, 2, 64, 4, 4, 128, 256, 32, True))  # type: ignore[arg-type]
    tokens = torch.arange(128).view(4, 32)
    alive = frozenset(buffer.untyped_storage()._cdata for buffer in model.buffers())
    store = Watching(0, alive=alive)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        gradients_of(model, lambda: model.head(model(tokens)).float().square().mean(), store)
    rows = 4 * 32
    for shape, dtype in store.exact():
        is_table = style == "llama" and shape.numel() <= 32 * 16
        assert not dtype.is_floating_point or is_table or shape.numel() in (rows, rows * 4), (shape, dtype)
    statistics = [shape for shape, _ in store.exact() if shape in (torch.Size([4, 4, 32]), torch.Size([4, 32, 4]))]
    assert len(statistics) == 2  # the normalizers of both attentions
    coded = [entry for entry in store.seen if isinstance(entry[2], QuantizedTensor)]
    assert len(coded) >= 2 * 8 and all(shape.numel() >= rows * 64 for shape, _, _ in coded)


def test_masks_take_one_bit() -> None:
    store = Watching(0)
    x = torch.randn(64, 64, requires_grad=True)
    with use_activation_store(store, smallest=1):
        dropped = F.dropout(x, 0.3)
        chosen = torch.where(torch.rand(64, 64) < 0.5, dropped, 0.0)
        chosen.sum().backward()
    kinds = [(dtype, type(coded)) for _, dtype, coded in store.seen]
    assert (torch.float32, PackedMask) in kinds or (torch.bool, PackedMask) in kinds
    assert x.grad is not None
    values = set(x.grad.unique().tolist())
    assert values <= {0.0, torch.tensor(1 / 0.7).item()}
    assert few_values(torch.tensor([0.0, 1.0]).repeat(1000))[1] == (0.0, 1.0)
    lone = torch.zeros(100_000)
    lone[17] = 3.0  # outside every sample
    assert few_values(lone) == (True, None)


def test_additive_masks_with_infinities_stay_exact() -> None:
    scores = torch.randn(4, 64, 64, requires_grad=True)
    mask = torch.full((64, 64), -torch.inf).triu(1)
    store = Watching(0)
    with use_activation_store(store, smallest=1):
        weights = torch.randn(64, 64)
        result = ((scores + mask).softmax(-1) * (weights + mask)).nan_to_num(0.0, 0.0, 0.0).sum()
    result.backward()
    assert not any(isinstance(coded, QuantizedTensor) and coded.size == mask.shape for _, _, coded in store.seen)


def twelve_blocks() -> BaseRun:
    return plain_run(batch=8, depth=12, style="gpt")


@pytest.mark.slow
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_explain_counts_the_stored_bytes(bits: int) -> None:
    run = compose(
        twelve_blocks(), with_optimizer([technique("memory.compress_activations", bits=bits, min_elements=512)]), 2
    )
    _, predicted = count(run, run.techniques)
    model = run.build_model()
    passes = CountedPasses(model, run.objective, run.backward, run.source.at(1))
    assert passes.followed_by(run.transform(), 2) == predicted
    bare = compose(twelve_blocks(), with_optimizer([]), 2)
    _, plain = count(bare, bare.techniques)
    held = 0
    store = Watching(0, lambda position: bits, smallest=512)
    with use_activation_store(store, smallest=1):
        prediction = run.objective.predict(model, run.source.at(1))
    for shape, dtype, coded in store.seen:
        parts = (
            (coded.codes, coded.least, coded.step)
            if isinstance(coded, QuantizedTensor)
            else (torch.empty(shape, dtype=dtype),)
        )
        held += sum(map(tensor_bytes, parts))
    assert prediction.hidden is not None
    # the rest: small tensors, and those that the loss saves
    assert held < predicted.activations < held + 0.25 * plain.activations
    assert predicted.activations < (bits + 3) / 32 * plain.activations + tensor_bytes(model.head.weight) * 2


def test_memory_is_freed_during_the_forward_pass() -> None:
    x = torch.randn(128, 256)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)))
    peaks = []
    for store in (None, QuantizedStore(0)):
        with StepTrace(x, *layers.parameters()) as live:
            if store is None:
                loss = layers(x).sum()
            else:
                with use_activation_store(store):
                    loss = layers(x).sum()
            peaks.append(live.peak)
            del loss
    assert peaks[1] < 0.4 * peaks[0]


def test_micro_batches_are_rounded_independently() -> None:
    """Two micro-batches of the same examples must not share their errors."""
    settings = CompressActivations(bits=2, min_elements=1)
    plain = plain_run(repeated=True)
    seeds: list[int] = []

    def inner(model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
        with torch.no_grad():
            objective.predict(model, batch)
        return plain_backward(model, objective, batch) + plain_backward(model, objective, batch)

    backward = QuantizingBackward(inner, settings)
    original = backward.store
    backward.store = lambda *args: note_seed(original(*args), seeds)  # type: ignore[method-assign]
    model = plain.build()
    for _ in range(2):
        backward(model, plain.objective, plain.source.at(0))
    assert len(seeds) == len(set(seeds)) == 4 and int(backward.state["calls"]) == 2


def note_seed(store: QuantizedStore, seeds: list[int]) -> QuantizedStore:
    seeds.append(store.seed)
    return store


@pytest.mark.slow
def test_block_inputs_are_compressed_with_recompute() -> None:
    compress = technique("memory.compress_activations", min_elements=512)
    both, alone, recompute = (
        count(run, run.techniques)[1].activations
        for run in (
            compose(twelve_blocks(), with_optimizer(chosen), 2)
            for chosen in ([compress, technique("memory.recompute")], [compress], [technique("memory.recompute")])
        )
    )
    assert both < 0.6 * min(alone, recompute)


@pytest.mark.slow
def test_compiled_blocks_are_compressed() -> None:
    torch._dynamo.reset()
    chosen = with_optimizer([technique("memory.compress_activations", min_elements=1), technique("compile")])
    records, _ = run_through(plain_run(repeated=True), chosen, 30)
    assert losses(records)[-1] < losses(records)[0] - 1.0


@pytest.mark.slow
def test_hugging_face_model_learns_in_4_bits() -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    from thrifty.objectives.next_token import NextToken

    class LikeOurs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = transformers.LlamaForCausalLM(config)

        def forward(self, tokens: Tensor) -> object:
            return self.model(input_ids=tokens)

    plain = replace(plain_run(repeated=True), build=LikeOurs, objective=NextToken())
    records, _ = run_through(plain, with_optimizer([technique("memory.compress_activations", min_elements=1)]), 30)
    assert losses(records)[-1] < losses(records)[0] - 1.0


# Adaptive bits --------------------------------------------------------------------------------------------------------


def adaptive(**settings: object) -> CompressActivations:
    return technique("memory.compress_activations", **({"adaptive": True, "every": 3, "min_elements": 1} | settings))  # type: ignore[return-value]


@pytest.mark.slow
def test_sensitivity_is_the_added_gradient_variance() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    x = torch.randn(64, 64) * torch.linspace(0.1, 3, 64)
    exact = gradients_of(net, lambda: net(x).square().mean(), None)

    def run(disturbed: int | None, seed: int = 0) -> None:
        store = small_codes(seed, lambda position: 4 if position == disturbed else 8)
        with use_activation_store(store, smallest=1):
            loss = net(x).square().mean()
        loss.backward()

    before = [torch.get_rng_state(), net[0].weight.grad]
    found = sensitivities(run, net, 3)
    assert torch.equal(torch.get_rng_state(), before[0]) and net[0].weight.grad is before[1]
    for position in range(3):
        draws = []
        for seed in range(200):
            store = small_codes(seed * 10, lambda p, position=position: 4 if p == position else 8)
            codes = gradients_of(net, lambda: net(x).square().mean(), store)
            draws.append(sum((a - b).square().sum().item() for a, b in zip(codes, exact, strict=True)))
        mean = sum(draws) / len(draws)
        assert 0.5 * mean < found[position] < 2 * mean


@pytest.mark.slow
def test_bits_are_allocated_by_sensitivity() -> None:
    plain = plain_run(repeated=True, style="gpt")
    run = compose(plain, with_optimizer([adaptive()]), 3)
    state = run.start()
    records = advance(run, state)
    memory = state.techniques["memory.compress_activations"]
    tensors = int(memory["tensors"])
    bits = memory["bits"][:tensors].tolist()
    assert int(memory["decided"]) == tensors and set(bits) <= {2, 4, 8} and len(set(bits)) > 1
    assert not memory["bits"][tensors:].any()
    shares = [note for note in records[1].notes if note.startswith("share_in")]
    assert shares and sum(records[1].notes[note] for note in shares) == pytest.approx(1)
    assert sum(int(n.split("_")[2]) * records[1].notes[n] for n in shares) <= 4


class Lopsided(nn.Module):
    """Two stacks of layers, one with little effect on the output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loud, self.quiet = (
            nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3))) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.loud(x) + 0.01 * self.quiet(x)


class MeanSquare(Objective):
    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        return Prediction(output=model(batch["x"]))

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        return (prediction.logits - 1).square().mean(1)


def test_adaptive_bits_add_less_variance_than_equal_bits() -> None:
    model, objective = Lopsided(), MeanSquare()
    batch = Batch({"x": torch.randn(64, 64)}, torch.full((64,), 1 / 64))
    backward = QuantizingBackward(plain_backward, adaptive())

    def gradients(objective: Objective) -> list[Tensor]:
        model.zero_grad()
        plain_backward(model, objective, batch)
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    exact = gradients(objective)

    def variance(bits: Callable[[int], int]) -> float:
        stores = (backward.store(model, batch, str(seed), bits) for seed in range(20))
        draws = [gradients(QuantizingObjective(objective, lambda *_, store=store: store)) for store in stores]
        return sum((a - b).square().sum().item() for draw in draws for a, b in zip(draw, exact, strict=True)) / 20

    model.zero_grad()
    backward(model, objective, batch)
    model.zero_grad()
    backward(model, objective, batch)
    assert set(backward.state["bits"].tolist()) >= {2, 8}
    assert variance(backward.decided()) < 0.5 * variance(lambda position: 4)


@pytest.mark.slow
def test_adaptive_bits_resume_exactly() -> None:
    plain = plain_run(depth=2, style="gpt", dropout=0.3)
    run = compose(plain, with_optimizer([adaptive()]), 6)
    state, saved = run.start(), []
    for stop in (1, 2, 4):
        advance(run, state, stop)
        saved.append(snapshot(state))
    advance(run, state)
    for each in saved:
        again = compose(plain, with_optimizer([adaptive()]), 6)
        resumed = restored(again, each)
        assert read_log(each.scalars) == resumed.log
        advance(again, resumed)
        assert_same(snapshot(resumed), snapshot(state))


@pytest.mark.slow
def test_structural_change_triggers_new_allocation() -> None:
    chosen = with_optimizer([adaptive(every=1000), technique("growth.stacking", at=(4,))])
    run = compose(plain_run(depth=4), chosen, 8)
    state = run.start()
    advance(run, state, 3)
    before = int(state.techniques["memory.compress_activations"]["decided"])
    advance(run, state)
    after = int(state.techniques["memory.compress_activations"]["decided"])
    assert 0 < before < after


@pytest.mark.slow
@pytest.mark.parametrize(
    "others", [["parallelism.shard"], ["large_batch.gradient_accumulation", "memory.recompute"]], ids=str
)
def test_adaptive_bits_combine_with_other_techniques(others: list[str], request: pytest.FixtureRequest) -> None:
    if any(name.startswith("parallelism") for name in others):
        request.getfixturevalue("one_rank")
    chosen = with_optimizer([adaptive(every=2), *(technique(name) for name in others)])
    records, state = run_through(plain_run(), chosen, STEPS)
    assert len(records) == STEPS and state.techniques["memory.compress_activations"]["bits"].any()


@pytest.mark.slow
def test_measuring_does_not_change_the_step() -> None:
    """Dropout masks, buffers and gradients are equal without a measurement."""
    plain = plain_run(style="gpt", dropout=0.3)
    heard: list[Tensor] = []

    def listening(inner: Backward) -> Backward:
        def backward(model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
            heard.append(torch.get_rng_state())
            return inner(model, objective, batch)

        return backward

    backward = QuantizingBackward(listening(plain_backward), adaptive(every=1))
    model = plain.build()
    for step in range(3):
        torch.manual_seed(step)
        state = torch.get_rng_state()
        backward(model, plain.objective, plain.source.at(step))
        assert torch.equal(heard[-1], state)


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(UsageError, match="multiple of 8"):
        CompressActivations(group=100)
    with pytest.raises(UsageError, match="adaptive"):
        CompressActivations(bits=2, adaptive=True)
    with pytest.raises(UsageError, match="saved tensors"):
        compose(plain_run(), with_optimizer([CompressActivations(), technique("memory.offload_activations")]), 2)
