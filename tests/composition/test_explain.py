"""Predicted memory and work of a run."""

import copy
from collections.abc import Callable
from functools import partial

import psutil
import pytest
import torch
from benchmarks.allocator_trace import measure_allocations
from tiny_runs import VOCABULARY, advance, plain_run, technique, with_optimizer
from torch import Tensor, nn

from thrifty.composition.compose import BaseRun, compose
from thrifty.composition.explain import count, explain, touched_modules
from thrifty.core.claims import Claim
from thrifty.core.errors import RefusedError
from thrifty.core.recipe import ModelSettings
from thrifty.modeling.parameter_kinds import is_hidden_matrix
from thrifty.models import build_model
from thrifty.objectives.next_token import NextToken

ADAMW, MUON = technique("optimizers.adamw"), technique("optimizers.muon")


@pytest.mark.slow
def test_rows_are_in_stage_order_and_contiguous() -> None:
    run = compose(
        plain_run(), [technique("memory.recompute"), ADAMW, technique("large_batch.gradient_accumulation")], 10
    )
    explanation = explain(run)
    assert [row.technique.name for row in explanation.rows] == [
        "memory.recompute", "large_batch.gradient_accumulation", "optimizers.adamw",
    ]  # fmt: skip
    befores = [row.before for row in explanation.rows]
    assert befores == [explanation.plain, *(row.after for row in explanation.rows[:-1])]
    assert explanation.footprint == explanation.rows[-1].after


def test_footprint_changes_of_techniques() -> None:
    def effect(name: str, **settings: object) -> tuple[dict[str, float], dict[str, float]]:
        chosen = [technique(name, **settings)]
        chosen += [] if Claim.OPTIMIZER in chosen[0].claims else [ADAMW]
        row = next(r for r in explain(compose(plain_run(batch=16), chosen, 10)).rows if r.technique.name == name)
        return row.before.as_dict(), row.after.as_dict()

    before, after = effect("memory.recompute")
    assert after["activations"] < before["activations"] / 2 and before["flops"] < after["flops"] < 1.4 * before["flops"]
    before, after = effect("large_batch.gradient_accumulation", micro_batches=4)
    assert after["activations"] == pytest.approx(before["activations"] / 4, rel=0.1)
    before, after = effect("optimizers.lion")
    assert after["optimizer"] == after["parameters"]
    before, after = effect("optimizers.adamw")
    assert after["optimizer"] == 2 * after["parameters"]
    before, after = effect("adapters.lora")
    assert after["gradients"] < before["gradients"] / 3
    before, after = effect("precision.mixed")
    assert after["activations"] < before["activations"] and after["parameters"] == before["parameters"]
    before, after = effect("data_selection.gradient_norm_sampling")
    assert after["flops"] == 2 * before["flops"]
    before, after = effect("sparsity.rigl")
    assert 0 < after["optimizer"] < after["parameters"] / 2  # one byte per masked weight
    before, after = effect("schedules.cosine")
    assert after == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sparsity.rigl", "precision.bfloat16_weights", "curriculum.sequence_length"])
def test_each_row_equals_a_separate_count(name: str) -> None:
    """Techniques that change only the update share the traced passes through the model."""
    names = (name, "gradients.clip", "optimizers.adamw", "schedules.cosine", "averaging.ema")
    run = compose(plain_run(), [technique(each) for each in names], 6)
    explanation = explain(run)
    for place, row in enumerate(explanation.rows):
        _, alone = count(run, run.techniques[: place + 1])
        assert row.after == alone


@pytest.mark.parametrize("others", [(), ("large_batch.gradient_accumulation",), ("averaging.ema", "gradients.clip")])
def test_matrix_products_of_muon_count_once_per_step(others: tuple[str, ...]) -> None:
    chosen = [technique(name) for name in others]
    muon, adamw = (explain(compose(plain_run(batch=16), [*chosen, each], 10)) for each in (MUON, ADAMW))
    model = plain_run(batch=16).build()
    shapes = [sorted(p.shape) for name, p in model.named_parameters() if is_hidden_matrix(name, p)]
    products = sum(20 * r * r * c + 10 * r**3 for r, c in shapes)  # Newton-Schulz, five iterations
    assert muon.footprint.flops - adamw.footprint.flops == pytest.approx(products, rel=1e-9)
    assert muon.plain.flops == adamw.plain.flops


def test_seldom_products_of_an_update_count_by_their_share() -> None:
    often, seldom = (
        explain(compose(plain_run(), [technique("optimizers.soap", every=every)], 100)).footprint for every in (1, 10)
    )
    assert often.update_flops > 2 * seldom.update_flops > 0


def test_explain_does_not_change_the_run() -> None:
    chosen = [ADAMW, technique("growth.stacking"), technique("data_selection.gradient_norm_sampling")]
    plain, explained = (compose(plain_run(), chosen, 5) for _ in range(2))
    explain(explained)
    touched_modules(explained)
    results = []
    for run in (plain, explained):
        state = run.start()
        results.append([record.loss for record in advance(run, state)])
        assert not any(hasattr(tensor, "fake_mode") for tensor in state.tensors().values())
    assert results[0] == results[1]


@pytest.mark.slow
def test_8b_model_is_explained_in_one_gigabyte() -> None:
    plain = plain_run()
    build = lambda: build_model(ModelSettings(preset="llama-8b"), 256, 16, seed=0)  # noqa: E731
    before = psutil.Process().memory_info().rss
    explanation = explain(
        compose(BaseRun(build, plain.source, plain.objective), [ADAMW, technique("adapters.lora")], 5)
    )
    assert explanation.parameters > 6e9
    assert explanation.footprint.parameters > 4 * 6e9
    assert psutil.Process().memory_info().rss - before < 1e9


def test_touched_modules_without_building_the_model() -> None:
    notes = touched_modules(compose(plain_run(depth=3), [ADAMW, technique("adapters.lora")], 5))
    assert notes["adapters.lora"][0].startswith("12 of 13 modules; skipped head: it is the head")
    with pytest.raises(RefusedError, match=r"adapters\.lora: rank '99'"):
        touched_modules(compose(plain_run(), [ADAMW, technique("adapters.lora", rank=99)], 5))


def test_explanation_is_plain_data_with_settings_and_stages() -> None:
    run = compose(plain_run(), [ADAMW, technique("gradients.clip", max_norm=0.5)], 5)
    notes = explain(run).as_dict({"gradients.clip": ["a note"]})
    clip = next(entry for entry in notes["techniques"] if entry["name"] == "gradients.clip")
    assert (clip["stage"], clip["numerics"], clip["settings"]) == ("clip", "different", {"max_norm": 0.5})
    assert clip["touched"] == ["a note"]
    assert notes["parameters"] == sum(p.numel() for p in plain_run().build().parameters())


class Copied(nn.Module):
    """Layers that are copies of each other, as in `nn.TransformerEncoder`, or copies of an existing module."""

    def __init__(self, original: nn.Module):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.ModuleList(copy.deepcopy(original) for _ in range(3))
        self.out = nn.Linear(32, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.out(x)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(32, 32), nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


@pytest.mark.parametrize("layer", [lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)), Normed])
@pytest.mark.parametrize("exists", [False, True], ids=["built", "copied"])
def test_deep_copied_layers_are_counted(layer: Callable[[], nn.Module], exists: bool) -> None:
    original_copy = Copied(layer())
    build = partial(copy.deepcopy, original_copy) if exists else lambda: Copied(layer())
    plain = plain_run()
    run = compose(BaseRun(build, plain.source, NextToken()), [technique("optimizers.adamw")], 3)
    assert explain(run).footprint.memory == pytest.approx(measure_allocations(run).peak, rel=0.01)


def test_meta_model_is_counted_like_a_cpu_model() -> None:
    plain = plain_run()

    def counted(device: str) -> float:
        with torch.device(device):
            model = Copied(nn.Linear(32, 32))
        run = compose(BaseRun(partial(copy.deepcopy, model), plain.source, NextToken()), with_optimizer([]), 3)
        return explain(run).footprint.memory

    assert counted("meta") == counted("cpu")
