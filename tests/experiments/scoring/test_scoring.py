"""Scoring of training examples by short runs: formulas, cache, refusals."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny_recipes import STEPS, digits, text
from tiny_runs import advance
from torch import Tensor

from thrifty.core.batches import ExampleSubset
from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.model_spec import ImageModelSpec
from thrifty.core.recipe import Budget, DataSettings, ObjectiveSettings, Recipe
from thrifty.core.score_file import ExampleScores, PredictedLabels, ScoreProvenance, average_scores, read_scores
from thrifty.data.epoch_sampler import EpochSource
from thrifty.experiments.scoring import scoring_methods
from thrifty.experiments.scoring.example_scoring import ScoringSettings, score
from thrifty.experiments.scoring.scoring_methods import METHODS, ScoringContext
from thrifty.experiments.scoring.scoring_run import plain_model_and_objective, trained_and_scored
from thrifty.models import export_model, shape_for
from thrifty.techniques import find
from thrifty.techniques.data_selection.prune import PrunedExamples
from thrifty.training.run_setup import prepare_run
from thrifty.training.trained_model import load_trained_model
from thrifty.training.trainer import train

STRANGE = ("precision.mixed", "attention.tiled", "memory.recompute")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def scored(recipe: Recipe, folder: Path, by: str = "el2n", name: str = "scores", **settings: object) -> ExampleScores:
    return score(recipe, ScoringSettings(by, **settings), folder / name)[0]  # type: ignore[arg-type]


def sight_of(recipe: Recipe, few: int = 0) -> ScoringContext:
    """Return the recipe's model after some steps, with all examples of the recipe or the first `few`."""
    prepared = prepare_run(recipe, quiet=True)
    state = prepared.run.start()
    advance(prepared.run, state, 3)
    examples = prepared.data.train
    assert isinstance(examples, EpochSource)
    if few:
        examples = examples.subset(ExampleSubset(torch.arange(few)))
    model, objective = plain_model_and_objective(prepared.run, state)
    return ScoringContext(model, objective, examples, torch.device("cpu"), 0, 10)


def logits_of(sight: ScoringContext) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        batches = list(sight.batches())
        found = [sight.objective.predict(sight.model, batch).logits for batch in batches]
    return torch.cat(found), torch.cat([batch["labels"] for batch in batches])


def test_el2n_loss_and_margin_match_their_formulas(tmp_path: Path) -> None:
    recipe = digits()
    prepared = prepare_run(recipe, quiet=True)
    state = prepared.run.start()
    advance(prepared.run, state, 5)
    assert state.model is not None
    train_images = prepared.data.train
    assert isinstance(train_images, EpochSource)
    (whole,) = train_images.sequential_batches(2000)
    with torch.no_grad():
        logits = prepared.run.objective.predict(state.model.eval(), whole).logits
    share, wanted = logits.softmax(-1), F.one_hot(whole["labels"], 10).float()
    expected = {
        "el2n": (share - wanted).square().sum(1).sqrt(),
        "loss": -(share.log() * wanted).sum(1),
        "margin": (share - 2 * wanted).amax(1) - (share * wanted).sum(1),
    }
    for by, values in expected.items():
        found = scored(recipe, tmp_path, by, by, runs=1, steps=5)
        torch.testing.assert_close(found.scores, values, rtol=1e-4, atol=1e-5)
        assert found.guesses is not None
        assert torch.equal(found.guesses.predicted, logits.argmax(-1))
        torch.testing.assert_close(found.guesses.own, (share * wanted).sum(1), rtol=1e-4, atol=1e-6)
    el2n = scored(recipe, tmp_path, "el2n", "again", runs=1, steps=5).scores
    assert (el2n >= 0).all() and (el2n <= math.sqrt(2)).all()


@pytest.mark.parametrize("kind", ["images", "text", "masked text", "custom backward passes"])
def test_grand_is_the_norm_of_single_backward_passes(kind: str, tmp_path: Path) -> None:
    if kind == "images":
        recipe = digits()
    elif kind == "masked text":
        recipe = text(tmp_path, "masked_token")
    else:
        names = STRANGE if kind != "text" else ()
        recipe = text(tmp_path, techniques=(*text(tmp_path).techniques, *(find(name)() for name in names)))
    sight = sight_of(recipe, few=70)
    found = scoring_methods.grand(sight)
    sight.model.eval()
    parameters = [parameter for parameter in sight.model.parameters() if parameter.requires_grad]
    assert len(found) == sight.examples.examples
    batch = next(iter(sight.batches()))
    for row in range(3):
        one = batch.rows(row, row + 1)
        one = one.weighted(torch.ones(1))
        loss = sight.objective.losses(sight.objective.predict(sight.model, one), one)
        gradients = torch.autograd.grad(loss.sum(), parameters)
        norm = math.sqrt(sum(float(each.square().sum()) for each in gradients))
        assert float(found[row]) == pytest.approx(norm, rel=1e-4)


def test_grand_does_not_depend_on_chunks_or_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sight = sight_of(digits(), few=70)
    wanted = scoring_methods.grand(sight)
    sight.examples.batch = 33
    monkeypatch.setattr(scoring_methods, "GRADIENT_BYTES", 30_000)
    torch.testing.assert_close(scoring_methods.grand(sight), wanted, rtol=1e-5, atol=1e-6)


def test_an_unbatchable_model_is_scored_one_example_at_a_time(tmp_path: Path) -> None:
    class Sealed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[override]
            return x.clone()

        @staticmethod
        def backward(ctx, of_x):  # type: ignore[override]
            return of_x

    sight = sight_of(text(tmp_path), few=20)
    wanted, messages = scoring_methods.grand(sight), []
    sight.model.register_forward_hook(lambda module, inputs, output: Sealed.apply(output))
    sight.say = messages.append
    torch.testing.assert_close(scoring_methods.grand(sight), wanted, rtol=1e-4, atol=1e-6)
    assert len(messages) == 1 and "one example at a time" in messages[0]


def test_el2n_of_texts_sums_squared_token_errors(tmp_path: Path) -> None:
    sight = sight_of(text(tmp_path))
    found = scoring_methods.el2n(sight)
    batch = next(iter(sight.batches()))
    with torch.no_grad():
        share = sight.objective.predict(sight.model.eval(), batch).logits.softmax(-1)
    wanted = F.one_hot(batch["tokens"][:, 1:], share.shape[-1])
    expected = (share - wanted).square().sum((1, 2)).sqrt()
    torch.testing.assert_close(found[: len(batch)], expected, rtol=1e-4, atol=1e-4)


def test_the_score_is_the_mean_over_runs_of_consecutive_seeds(tmp_path: Path) -> None:
    three = scored(digits(seed=4), tmp_path, runs=3)
    assert three.facts.seeds == (4, 5, 6) and three.facts.steps == round(0.2 * STEPS) and three.runs.shape == (3, 1300)
    torch.testing.assert_close(three.scores, three.runs.mean(0))
    alone = scored(digits(seed=5), tmp_path, name="alone", runs=1)
    assert torch.equal(alone.scores, three.runs[1])
    assert torch.equal(read_scores(tmp_path / "scores").runs, three.runs)
    assert three.facts.flops == pytest.approx(3 * alone.facts.flops)


def test_counted_flops_are_steps_plus_scoring_passes(tmp_path: Path) -> None:
    by_steps = {steps: scored(digits(), tmp_path, name=f"{steps}", runs=1, steps=steps).facts for steps in (0, 2, 4)}
    forward = by_steps[0].flops
    step = by_steps[2].flops - forward
    assert forward > 0 and by_steps[4].flops - forward == pytest.approx(2 * step)
    assert step / 2 / 64 == pytest.approx(3 * forward / 1300, rel=0.1)  # a step costs three forward passes
    grand = scored(digits(), tmp_path, "grand", "grand", runs=1, steps=0).facts
    assert grand.flops == pytest.approx(4 * forward)  # plus one forward pass for the predicted labels
    assert by_steps[4].seconds > 0


def test_an_interrupted_scoring_computes_only_missing_runs(tmp_path: Path) -> None:
    class CutError(Exception):
        pass

    def cut(line: str) -> None:
        if line.startswith("run 2"):
            raise CutError

    with pytest.raises(CutError):
        score(digits(), ScoringSettings(runs=2), tmp_path / "scores", say=cut)
    assert not (tmp_path / "scores").exists()
    messages: list[str] = []
    found, _ = score(digits(), ScoringSettings(runs=3), tmp_path / "scores", say=messages.append)
    assert [line.split(": ")[1] for line in messages] == ["from the cache", "2 steps", "2 steps"]
    others = digits(budget=Budget(steps=STEPS), name="another", evaluation=replace(digits().evaluation, every=3))
    again, _ = score(others, ScoringSettings(runs=3), tmp_path / "again", say=messages.append)
    assert torch.equal(again.runs, found.runs) and messages[-1].endswith("from the cache")
    changed = digits(model=replace(digits().model, width=32))
    score(changed, ScoringSettings(runs=1), tmp_path / "changed", say=messages.append)
    assert messages[-1].endswith("2 steps")


def test_a_damaged_cache_entry_is_recomputed(tmp_path: Path, cache: Path) -> None:
    before = scored(digits(), tmp_path, runs=1)
    (kept,) = (cache / "scores").rglob("*.safetensors")
    kept.write_bytes(kept.read_bytes()[:-100])
    assert torch.equal(scored(digits(), tmp_path, name="again", runs=1).scores, before.scores)


def test_all_examples_are_scored_whatever_the_recipe_prunes(tmp_path: Path) -> None:
    pruned = digits(techniques=(*digits().techniques, PrunedExamples(order="random", keep=0.5)))
    found = scored(pruned, tmp_path, runs=1)
    assert len(found) == 1300
    assert torch.equal(found.scores, scored(digits(), tmp_path, name="whole", runs=1).scores)


def test_forgetting_counts_events_during_training(tmp_path: Path) -> None:
    recipe = digits(budget=Budget(steps=20))
    found = scored(recipe, tmp_path, "forgetting", runs=1, steps=20).scores
    prepared = prepare_run(recipe, quiet=True)
    state = prepared.run.start()
    right: list[Tensor] = []
    for step in range(2, 21, 2):
        advance(prepared.run, state, step)
        assert state.model is not None and isinstance(prepared.data.train, EpochSource)
        (whole,) = prepared.data.train.sequential_batches(2000)
        with torch.no_grad():
            logits = prepared.run.objective.predict(state.model.eval(), whole).logits
        right.append(logits.argmax(-1) == whole["labels"])
    falls = torch.stack([before & ~after for before, after in pairwise(right)]).sum(0)
    never = ~torch.stack(right).any(0)
    assert torch.equal(found, torch.where(never, 10, falls).float())
    assert never.any() and falls.any()


@pytest.mark.slow
def test_prototypes_with_embedding_model_and_with_own_runs(tmp_path: Path) -> None:
    recipe = digits(name="embedder")
    train(recipe, tmp_path / "runs", quiet=True)
    named = scored(recipe, tmp_path, "prototype", embed_with=str(tmp_path / "runs" / "embedder"))
    assert named.facts.steps == 0 and named.facts.model.endswith("embedder") and named.guesses is None
    assert (named.scores >= 0).all() and (named.scores <= 2).all() and len(named.scores.unique()) > 1000
    own = scored(recipe, tmp_path, "prototype", "own", runs=1, steps=STEPS)
    torch.testing.assert_close(own.scores, named.scores, rtol=1e-3, atol=1e-4)  # equal seeds yield equal runs
    model, _ = load_trained_model(tmp_path / "runs" / "embedder")
    ends = prepare_run(recipe, quiet=True).data.ends
    assert isinstance(ends, ImageModelSpec)
    export_model(model, shape_for(ends, recipe.model), tmp_path / "exported", images=ends)
    exported = scored(recipe, tmp_path, "prototype", "exported-scores", embed_with=str(tmp_path / "exported"))
    torch.testing.assert_close(exported.scores, named.scores, rtol=1e-3, atol=1e-5)
    other = replace(recipe, data=replace(recipe.data, size=16))
    with pytest.raises(UsageError, match="expects images of 8 pixels"):
        scored(other, tmp_path, "prototype", "wrong", embed_with=str(tmp_path / "runs" / "embedder"))


def test_prototypes_of_texts_require_a_number_of_clusters(tmp_path: Path) -> None:
    found = scored(text(tmp_path), tmp_path, "prototype", runs=1, clusters=4)
    assert found.scores.std() > 0 and found.labels is None
    with pytest.raises(UsageError, match="number of clusters"):
        scored(text(tmp_path), tmp_path, "prototype", "other", runs=1)


def test_the_controls_train_nothing(tmp_path: Path) -> None:
    by_norm = scored(digits(), tmp_path, "input_norm", "norm")
    prepared = prepare_run(digits(), quiet=True)
    assert isinstance(prepared.data.train, EpochSource)
    (whole,) = prepared.data.train.sequential_batches(2000)
    torch.testing.assert_close(by_norm.scores, whole["inputs"].flatten(1).norm(dim=1))
    chance = scored(digits(), tmp_path, "random", "random")
    assert by_norm.facts.flops == chance.facts.flops == 0 and len(chance.runs) == 1
    assert not torch.equal(chance.scores, scored(digits(seed=1), tmp_path, "random", "other").scores)


@pytest.mark.parametrize("by", METHODS)
def test_every_method_records_data_and_recipe(by: str, tmp_path: Path) -> None:
    found = scored(digits(), tmp_path, by, runs=1)
    prepared = prepare_run(digits(), quiet=True)
    facts = found.facts
    assert facts.method == by and facts.fingerprint == prepared.data.train.example_index().fingerprint
    assert facts.label_names == tuple("0123456789") and facts.data == dict(prepared.data.identity)
    assert facts.recipe["data"]["source"] == "digits" and facts.thrifty and len(facts.recipe_sha256) == 64
    assert found.scores.shape == (1300,) and found.scores.isfinite().all()


def test_votes_of_several_runs() -> None:
    def part(predicted: list[int], confidence: list[float], own: list[float]) -> ExampleScores:
        guesses = PredictedLabels(torch.tensor(predicted), torch.tensor(confidence), torch.tensor(own))
        return ExampleScores(
            torch.zeros(2), torch.zeros(1, 2), ScoreProvenance("el2n", "x", seeds=(len(predicted),)), None, guesses
        )

    parts = [
        part([1, 0], [0.9, 0.5], [0.1, 0.5]),
        part([2, 0], [0.5, 0.7], [0.1, 0.7]),
        part([2, 1], [0.6, 0.9], [0.0, 0.0]),
    ]
    found = average_scores(parts).guesses
    assert found is not None and found.predicted.tolist() == [2, 0]
    assert found.confidence.tolist() == pytest.approx([1.1 / 3, 1.2 / 3])
    assert found.own.tolist() == pytest.approx([0.2 / 3, 0.4])


def test_non_finite_scores_are_refused(tmp_path: Path) -> None:
    recipe = digits(techniques=(find("optimizers.adamw")(lr=1e30),))
    with pytest.raises(Exception, match="not finite"):
        scored(recipe, tmp_path, "loss", runs=1, steps=STEPS)
    assert not (tmp_path / "scores").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"by": "el2m"}, "did you mean 'el2n'"),
        ({"runs": 0}, "runs is 0"),
        ({"by": "random", "runs": 3}, "3 runs by random give equal scores"),
        ({"embed_with": "runs/x"}, "an embedding model requires the method prototype"),
        ({"clusters": 4}, "a number of clusters requires the method prototype"),
        ({"by": "prototype", "embed_with": "x", "runs": 2}, "2 runs with an embedding model give equal scores"),
        ({"steps": 1.5}, "steps is '1.5'"),
        ({"steps": -1}, "steps is '-1'"),
        ({"by": "forgetting", "steps": 0}, "forgetting requires at least 1 step"),
    ],
)
def test_invalid_settings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ScoringSettings(**settings)


def test_unsupported_examples_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for by, needs in (("margin", "labels"), ("forgetting", "labels"), ("input_norm", "inputs")):
        with pytest.raises(UsageError, match=f"--method {by} requires examples with {needs}"):
            scored(text(tmp_path), tmp_path, by)
    with pytest.raises(UsageError, match="11 steps are more than the recipe's 10"):
        scored(digits(), tmp_path, steps=11)
    with pytest.raises(UsageError, match="neither a run folder nor a model folder"):
        scored(digits(), tmp_path, "prototype", embed_with=str(tmp_path))
    talk = tmp_path / "talk.jsonl"
    line = '{"messages": [{"role": "user", "content": "Q%d?"}, {"role": "assistant", "content": "A%d."}]}\n'
    talk.write_text("".join(line % (number, number) for number in range(80)))
    data = DataSettings(source=str(talk), vocabulary=300, length=32, batch=4)
    answers = replace(text(tmp_path), data=data, objective=ObjectiveSettings("chat_answers"))
    with pytest.raises(RefusedError, match="no fixed numbers"):
        scored(answers, tmp_path)
    scored(digits(), tmp_path, "random")
    with pytest.raises(UsageError, match="exists already"):
        scored(digits(), tmp_path, "random")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="one process"):
        scored(digits(), tmp_path, name="more")


def test_a_batch_dependent_loss_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from thrifty.objectives.classification import Classification

    monkeypatch.setattr(Classification, "joint", True, raising=False)
    with pytest.raises(UsageError, match="depends on the whole batch"):
        scored(digits(), tmp_path)


def test_growing_models_are_scored_in_their_final_form(tmp_path: Path) -> None:
    stacking = find("growth.stacking")(at=(1,))
    recipe = digits(model=replace(digits().model, depth=2), techniques=(*digits().techniques, stacking))
    found, sight = trained_and_scored(prepare_run(recipe, quiet=True), "grand", 3, 0, 0, lambda text: None)
    assert len([name for name, _ in sight.model.named_parameters() if name.startswith("blocks.1.")]) > 0
    assert found.isfinite().all()
