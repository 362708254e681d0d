"""`thrifty.estimate` on modules that the toolkit has never seen, against what the allocator gives out."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
from benchmarks.bench_estimate import mean, measured_peak
from benchmarks.random_models import random_step
from torch import Tensor, nn

import thrifty
from thrifty.core.errors import UsageError
from thrifty.core.plain_values import write_size

TOKENS = torch.randint(200, (8, 32), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(20, 3, 32, 32, generator=torch.Generator().manual_seed(0))
Loss = Callable[[nn.Module, Any], Any]


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.1)
    return nn.Sequential(
        nn.Embedding(200, 64), nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Linear(64, 200)
    )


def convolutions() -> nn.Module:
    blocks = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.GELU()]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def stack() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)])


ROWS = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))


class Recurrent(nn.Module):
    """A tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.memory = nn.Embedding(200, 48), nn.GRU(48, 48, batch_first=True)
        self.out = nn.Linear(48, 200, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.memory(self.embedding(tokens))[0])


class Routed(nn.Module):
    """Experts that are given tokens by indices: how many depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.router = nn.Embedding(200, 32), nn.Linear(32, 2)
        self.experts, self.out = nn.ModuleList(nn.Linear(32, 32) for _ in range(2)), nn.Linear(32, 200)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).flatten(0, 1)
        chosen, result = self.router(x).argmax(-1), torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == i)
            result = result.index_add(0, rows, expert(x[rows]))
        return self.out(result).view(*tokens.shape, -1)


def token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def pooled_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens), tokens[:, 0])


def example_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).transpose(1, 2), tokens, reduction="none").mean(1)


def weighted_loss(model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    losses = F.cross_entropy(model(tokens).transpose(1, 2), tokens, reduction="none")
    return losses, (tokens > 0).float()


def image_loss(model: nn.Module, images: Tensor) -> Tensor:
    return model(images).square().mean(1)


class Half(nn.Module):
    """Half of it is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, rows: Tensor) -> Tensor:
        return self.used(rows)


class Gated(nn.Module):
    """Its kernel keeps gates that torch's fake tensors know nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cells = nn.Embedding(200, 32), nn.LSTM(32, 64, 2, batch_first=True)
        self.out = nn.Linear(64, 200)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.cells(self.embedding(tokens))[0])


class Pooled(nn.Module):
    """The gradient of the mean is expanded, which the norm's kernel copies."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.out = nn.Embedding(200, 256), nn.LayerNorm(256), nn.Linear(256, 200)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.norm(self.embedding(tokens)).mean(1))


class LayersLeftOut(nn.Module):
    """Leaves out each layer with a probability that makes a step with all of them rare."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.layers, self.rate = nn.ModuleList(nn.Linear(64, 64) for _ in range(6)), rate

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand([]) >= self.rate:
                rows = layer(rows).relu()
        return rows


def channels_last() -> nn.Module:
    blocks = [nn.Conv2d(3, 16, 3, padding=1), nn.GELU(), nn.AvgPool2d(2), nn.Conv2d(16, 8, 3)]
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


CASES: dict[str, tuple[Callable[[], nn.Module], Tensor, Loss]] = {
    "encoder": (encoder, TOKENS, token_loss),
    "losses of examples": (encoder, TOKENS, example_loss),
    "weighted losses": (encoder, TOKENS, weighted_loss),
    "convolutions": (convolutions, IMAGES, image_loss),
    "recurrent": (Recurrent, TOKENS, token_loss),
    "LSTM": (Gated, TOKENS, token_loss),
    "unused parameters": (Half, ROWS, image_loss),
    "experts by indices": (Routed, TOKENS, token_loss),
    "a mean after a norm": (Pooled, TOKENS, pooled_loss),
    "channels last": (channels_last, IMAGES.to(memory_format=torch.channels_last), image_loss),
}


def measured(model: nn.Module, batch: Any, loss: Loss, optimizer: Any = torch.optim.AdamW) -> float:
    """Bytes at the peak of a plain loop."""
    made = optimizer([named for named in model.named_parameters() if named[1].requires_grad], lr=1e-4)

    def step() -> None:
        mean(loss(model, batch)).backward()
        made.step()
        made.zero_grad()

    return measured_peak(model, made, step, batch)


@pytest.mark.parametrize("name", CASES)
def test_the_peak_of_a_step_equals_the_allocators(name: str) -> None:
    build, batch, loss = CASES[name]
    torch.manual_seed(0)
    model = build()
    fit = thrifty.estimate(copy.deepcopy(model), batch, loss=loss, optimizer=torch.optim.AdamW)
    assert fit.peak == pytest.approx(measured(model, batch, loss), rel=0.01)
    assert sum(fit.parts.values()) == pytest.approx(fit.peak)
    assert fit.parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.NAdam, torch.optim.Adafactor])
def test_state_and_step_of_a_torch_optimizer_are_counted(optimizer: Any) -> None:
    model = encoder()
    fit = thrifty.estimate(model, TOKENS[:1, :8], loss=token_loss, optimizer=optimizer)
    assert fit.peak == pytest.approx(measured(model, TOKENS[:1, :8], token_loss, optimizer), rel=0.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_dtype_of_a_model_is_honoured(dtype: torch.dtype) -> None:
    model = encoder().to(dtype)
    fit = thrifty.estimate(model, TOKENS, loss=token_loss, optimizer=torch.optim.AdamW)
    assert fit.parts["parameters"] == 2 * fit.parameters
    assert fit.peak == pytest.approx(measured(model, TOKENS, token_loss), rel=0.01)


def test_autocast_in_a_loss_is_counted() -> None:
    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return token_loss(model, tokens)

    fit = thrifty.estimate(encoder, TOKENS, loss=loss, optimizer=torch.optim.AdamW)
    assert fit.peak == pytest.approx(measured(encoder(), TOKENS, loss), rel=0.01)


@pytest.mark.parametrize("number", [5, 8])
def test_a_random_model_has_the_predicted_peak(number: int) -> None:
    _check_random_model(1000, number)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(30))
def test_random_models_have_the_predicted_peak(number: int) -> None:
    _check_random_model(2000, number)


def _check_random_model(seed: int, number: int) -> None:
    try:
        case = random_step(seed, number)
    except ImportError as error:  # timm, which is no requirement of the tests
        pytest.skip(str(error))
    optimizer = case.optimizer if not isinstance(case.optimizer, str) else getattr(thrifty.optim, case.optimizer)
    loss = case.loss or (lambda model, batch: model(**batch).loss)
    real = measured(case.build(), case.batch, loss, optimizer)
    fit = thrifty.estimate(case.build, case.batch, loss=case.loss, optimizer=optimizer)
    assert fit.peak == pytest.approx(real, rel=0.08), case.label


@pytest.mark.parametrize("name", ["encoder", "convolutions", "recurrent"])
def test_a_meta_model_is_estimated_like_a_real_one(name: str) -> None:
    build, batch, loss = CASES[name]
    with torch.device("meta"):
        absent = build()
    assert thrifty.estimate(absent, batch.to("meta"), loss=loss).peak == thrifty.estimate(build, batch, loss=loss).peak


def test_nothing_is_allocated_for_a_model_in_memory_or_in_none() -> None:
    def wide() -> nn.Module:
        model = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(8)])  # 0.5 GB
        model.register_buffer("table", torch.zeros(1))
        return model

    model, before = wide(), psutil.Process().memory_info().rss
    peaks = [
        thrifty.estimate(each, torch.randn(4, 4096), loss=image_loss).peak
        for each in (model, wide, partial(nn.Sequential, *[model]))
    ]
    assert peaks[0] == peaks[1] > 2e9
    assert psutil.Process().memory_info().rss - before < 0.3e9


def test_a_builder_that_reads_values_requires_no_weights() -> None:
    def build() -> nn.Module:
        rates = torch.linspace(0, 0.1, 3, device="cpu").tolist()
        return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Dropout(rate)) for rate in rates])

    fit = thrifty.estimate(build, torch.randn(4, 64), loss=image_loss)
    assert fit.parts["parameters"] == 4 * fit.parameters and not fit.notes


def test_a_step_that_does_not_fit_has_options_that_do() -> None:
    whole = thrifty.estimate(stack, ROWS, loss=image_loss)
    assert whole.fits and not whole.options
    tight = thrifty.estimate(stack, ROWS, loss=image_loss, memory=0.6 * whole.peak)
    assert not tight.fits and len(tight.options) > 2
    for option in tight.options[:2]:
        again = thrifty.estimate(stack, ROWS, loss=image_loss, techniques=option.techniques, memory=0.6 * whole.peak)
        assert again.fits and again.peak == pytest.approx(option.peak)
    assert [*tight.options] == sorted(tight.options, key=lambda option: option.relative_time)
    assert "does not fit" in str(tight) and tight.options[0].label in str(tight)
    assert tight.options[0].label in tight._repr_html_()


def test_techniques_for_fresh_weights_have_options_too() -> None:
    """The options are for any weights, but the techniques of the step are the user's choice."""
    shared: dict[str, Any] = {"loss": token_loss, "techniques": ["share_parameters"]}
    whole = thrifty.estimate(encoder, TOKENS, **shared)
    tight = thrifty.estimate(encoder, TOKENS, **shared, memory=0.7 * whole.peak)
    assert not tight.fits and tight.options


@pytest.mark.parametrize("rate", [0.5, 0.9])
def test_layers_that_are_left_out_at_random_are_counted(rate: float) -> None:
    fit = thrifty.estimate(partial(LayersLeftOut, rate), ROWS, loss=image_loss)
    assert fit.peak == pytest.approx(measured(LayersLeftOut(0.0), ROWS, image_loss), rel=0.01)


def test_a_fitting_step_keeps_a_reserve() -> None:
    peak = thrifty.estimate(stack, ROWS, loss=image_loss).peak
    for factor in (1.01, 1.03):
        assert thrifty.estimate(stack, ROWS, loss=image_loss, memory=factor * peak).fits is (factor > 1.02)


def test_options_are_those_that_change_no_more_than_is_allowed() -> None:
    fit = thrifty.estimate(stack, ROWS, loss=image_loss, memory="4MB", allow="exact")
    assert not fit.fits and {option.numerics for option in fit.options} == {"exact"}


def test_a_gpu_that_is_not_here_has_its_memory_and_no_process() -> None:
    fit = thrifty.estimate(encoder, TOKENS, loss=token_loss, device="H100")
    assert fit.fits and fit.memory == 80 * 2**30 and fit.process is None


def test_frozen_parameters_have_neither_gradients_nor_moments() -> None:
    model = encoder()
    model[1].requires_grad_(False)
    for optimizer in ("adamw", torch.optim.AdamW):
        fit = thrifty.estimate(model, TOKENS, loss=token_loss, optimizer=optimizer)
        trained = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
        assert fit.parts["optimizer"] == pytest.approx(8 * sum(trained), abs=4 * len(trained))


def test_an_optimizer_object_counts_its_own_parameters() -> None:
    model = encoder()
    few = torch.optim.AdamW(model[2].parameters(), lr=1e-3)
    fit = thrifty.estimate(model, TOKENS, loss=token_loss, optimizer=few)
    own = sum(parameter.numel() for parameter in model[2].parameters())
    assert fit.parts["optimizer"] == pytest.approx(8 * own, abs=8)
    lion = thrifty.optim.Lion(model, lr=1e-4)
    state = thrifty.estimate(model, TOKENS, loss=token_loss, optimizer=lion).parts["optimizer"]
    assert state == thrifty.estimate(model, TOKENS, loss=token_loss, optimizer="lion").parts["optimizer"]


@pytest.mark.parametrize(
    ("kind", "applied"),
    [
        ("AdamW", ["ema"]),
        ("Muon", ["ema", "clip"]),
        ("Muon", ["rigl"]),
        ("Lion", ["rigl:density=0.3", "ema"]),
        ("Sgd", ["set"]),
        ("Soap", ["averaging.latest"]),
        ("AdamW", ["precision.optimizer_state", "ema"]),
        ("Adafactor", []),
        ("Adafactor", ["ema"]),
    ],
)
@pytest.mark.filterwarnings("ignore:.*masks never move")
def test_state_of_techniques_applied_to_the_optimizer_is_counted(kind: str, applied: list[str]) -> None:
    model = encoder()
    optimizer = getattr(thrifty.optim, kind)(model, lr=1e-3)
    for words in applied:
        is_mask = words.startswith(("rigl", "set"))
        thrifty.apply((model, optimizer) if is_mask else optimizer, words, total_steps=50)
    fit = thrifty.estimate(model, TOKENS, loss=token_loss, optimizer=optimizer)
    token_loss(model, TOKENS).mean().backward()
    optimizer.step()
    slots = [value for state in optimizer.state.values() for value in state.values()]
    real = sum(value.nbytes for value in slots if torch.is_tensor(value))
    assert fit.parts["optimizer"] == pytest.approx(real, abs=8 * len(slots))


def test_a_model_of_transformers_computes_its_own_loss() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=200)
    model = transformers.GPT2LMHeadModel(config)
    fit = thrifty.estimate(model, {"input_ids": TOKENS, "labels": TOKENS}, memory="1GB")
    assert fit.fits and fit.parameters == model.num_parameters()


def test_config_folder_and_file_have_equal_estimates(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=200
    )
    config.save_pretrained(tmp_path)
    fits = [thrifty.estimate(each, 4, length=32) for each in (config, tmp_path, tmp_path / "config.json")]
    assert len({fit.peak for fit in fits}) == 1
    assert fits[0].parameters == transformers.LlamaForCausalLM(config).num_parameters()
    tokens = TOKENS[:4]
    assert thrifty.estimate(tmp_path, {"input_ids": tokens, "labels": tokens}).peak == fits[0].peak


@pytest.mark.parametrize("preset", ["llama-nano", "bert-nano", "t5-nano", "vit-nano"])
def test_a_preset_needs_no_data(preset: str) -> None:
    fit = thrifty.estimate(preset, 2)
    assert fit.peak > 4 * fit.parameters and "a batch of 2 random" in str(fit)


def test_a_preset_on_data_is_estimated_as_it_is_trained(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    fit = thrifty.estimate("llama-nano", 4, data=text, length=32)
    assert fit.peak < thrifty.estimate("llama-nano", 4, length=32).peak  # whose vocabulary is larger


def test_parts_of_a_batch_that_are_no_rows_stay_as_they_are() -> None:
    batch = {"tokens": TOKENS, "times": 2.0, "names": ["a"], "nothing": None}

    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return batch["times"] * token_loss(model, batch["tokens"])

    fit = thrifty.estimate(encoder, batch, loss=loss)
    assert fit.parts["batch"] == TOKENS.nbytes


def test_a_step_that_depends_on_values_needs_a_batch_with_values() -> None:
    fit = thrifty.estimate(Routed, TOKENS, loss=token_loss)
    assert any("counted on a real batch" in note for note in fit.notes)
    with torch.device("meta"):
        absent = Routed()
    with pytest.raises(UsageError, match="depend on values") as error:
        thrifty.estimate(absent, TOKENS, loss=token_loss)
    assert "not on the meta device" in error.value.fix


def test_the_process_stays_within_the_stated_bounds() -> None:
    fit = thrifty.estimate(encoder, TOKENS, loss=token_loss)
    assert fit.process is not None
    low, high = fit.process
    assert low < psutil.Process().memory_info().rss < high
    assert f"{write_size(low)} to {write_size(high)}" in str(fit)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"batch": "text"}, "no tensor with one row per example"),
        ({"batch": TOKENS[:0]}, "no examples"),
        ({"batch": None}, "no batch"),
        ({"batch": torch.randn(8, 5)}, r"does not run on a batch of \(8, 5\) float32"),
        ({"loss": None}, "without a loss"),
        ({"loss": lambda model, batch: None}, "is a NoneType"),
        ({"model": lambda: encoder().requires_grad_(False)}, "has no gradient"),
        ({"model": 3}, "neither a module"),
        ({"model": "gpt-nan"}, "neither a preset nor a folder"),
        ({"model": "clip-nano", "loss": None, "batch": 2}, "requires data"),
        ({"memory": "many"}, "is not a size"),
        ({"memory": -1}, "is not a size"),
        ({"optimizer": "lora"}, "is not an optimizer"),
        ({"optimizer": torch.optim.LBFGS}, "closure"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"allow": "some"}, "is unknown"),
    ],
)
def test_invalid_estimates_are_refused_with_the_fix(
    changed: dict[str, Any], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match=words) as error:
        thrifty.estimate(**{"model": encoder, "batch": TOKENS, "loss": token_loss, **changed})
    assert error.value.fix and "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("memory", ["24GB", "24 GB", 24e9, 24_000_000_000])
def test_memory_is_read_in_every_spelling(memory: str | float) -> None:
    assert thrifty.estimate(encoder, TOKENS, loss=token_loss, memory=memory).memory == 24e9


def test_a_mixture_of_sources_is_estimated(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        words = (f"text {number} of {name}: {number**3} words" for number in range(800))
        (tmp_path / name).write_text("\n\n".join(words))
    mixture = {str(tmp_path / name): 1.0 for name in ("a.txt", "b.txt")}
    assert thrifty.estimate("gpt-nano", data=mixture, length=32).peak
