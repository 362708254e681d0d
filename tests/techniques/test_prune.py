"""Pruning by scores: kept examples and refused settings."""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from image_runs import image_run
from tiny_runs import plain_run, run_through, with_optimizer

from thrifty.composition.compose import BaseRun, compose
from thrifty.core.batches import Batch
from thrifty.core.errors import IntegrityError, RefusedError, UsageError
from thrifty.core.score_file import ExampleScores, PredictedLabels, ScoreProvenance, read_scores, scores_bytes
from thrifty.techniques.data_selection.prune import PrunedExamples, kept_examples, order_by_abundance

FEW = torch.tensor([0.1, 0.9, 0.5, 0.7, 0.3, 0.2, 0.8, 0.6])


def scored(plain: BaseRun, **facts: object) -> ExampleScores:
    """Return scores that rise with the index of the example."""
    there = plain.source.example_index()
    scores = torch.arange(there.count).float()
    printed = ScoreProvenance(method="el2n", fingerprint=there.fingerprint, flops=2e9, seconds=4.0, **facts)  # type: ignore[arg-type]
    return ExampleScores(scores, scores[None], printed, there.labels)


def written(scores: ExampleScores, path: Path) -> dict[str, str]:
    """Return the settings for a file of scores."""
    path.write_bytes(scores_bytes(scores))
    return {"scores": str(path), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def test_hard_easy_and_the_offset_on_eight_scores() -> None:
    assert kept_examples(FEW, None, 0.5).tolist() == [1, 3, 6, 7]
    assert kept_examples(FEW, None, 0.5, "easy").tolist() == [0, 2, 4, 5]
    assert kept_examples(FEW, None, 0.5, "hard", drop_hardest=0.25).tolist() == [2, 3, 4, 7]
    assert kept_examples(FEW, None, 0.01).tolist() == [1]
    assert kept_examples(torch.zeros(6), None, 0.5).tolist() == [0, 1, 2]


def test_min_class_share_keeps_the_hardest_of_an_easy_class() -> None:
    labels = torch.tensor([0, 1, 0, 1, 0, 0, 1, 1])  # 1 is hard, 0 is easy
    assert kept_examples(FEW, labels, 0.5).tolist() == [1, 3, 6, 7]
    assert kept_examples(FEW, labels, 0.5, min_class_share=0.5).tolist() == [1, 2, 3, 6]
    assert kept_examples(FEW, labels, 0.5, min_class_share=1.0).tolist() == [1, 2, 4, 6]


Case = some.tuples(
    some.lists(some.tuples(some.floats(0, 1, width=32), some.integers(0, 4)), min_size=1, max_size=60),
    some.floats(0.05, 1),
    some.floats(0, 0.9),
    some.floats(0, 1),
    some.sampled_from(["hard", "easy", "random"]),
)


@given(Case)
def test_kept_examples_obey_all_settings_for_any_scores(case: tuple) -> None:
    rows, keep, offset, floor, order = case
    scores, labels = torch.tensor([row[0] for row in rows]), torch.tensor([row[1] for row in rows])
    count, left_out = max(round(keep * len(rows)), 1), round(offset * len(rows))
    if keep + offset > 1 or left_out == len(rows):
        with pytest.raises(RefusedError, match="exceeds 1"):
            kept_examples(scores, labels, keep, order, offset, floor)
        return
    kept, count = kept_examples(scores, labels, keep, order, offset, floor), min(count, len(rows) - left_out)
    assert len(kept) == count and kept.tolist() == sorted(set(kept.tolist()))
    hardest = sorted(range(len(rows)), key=lambda i: (-float(scores[i]), i))[:left_out]
    assert not set(hardest) & set(kept.tolist())
    least = int(floor * count / len(labels[[i for i in range(len(rows)) if i not in hardest]].unique()))
    for label in labels.unique().tolist():
        own = [i for i in range(len(rows)) if labels[i] == label and i not in hardest]
        assert sum(int(labels[i]) == label for i in kept.tolist()) >= min(least, len(own))


@pytest.mark.parametrize(("examples", "keep", "offset", "kept"), [(1315, 0.9, 0.1, 1183), (3, 0.5, 0.5, 1)])
def test_fractions_that_sum_to_one_are_accepted(examples: int, keep: float, offset: float, kept: int) -> None:
    assert len(kept_examples(torch.arange(float(examples)), None, keep, drop_hardest=offset)) == kept


def test_random_examples_depend_on_the_seed_only() -> None:
    one, same, other = (kept_examples(torch.zeros(100), None, 0.5, "random", seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert torch.equal(one, kept_examples(torch.rand(100), None, 0.5, "random"))


def test_abundance_decides_the_order() -> None:
    labels = torch.arange(10) % 2
    assert order_by_abundance(100, labels, 50) == "hard"
    assert order_by_abundance(99, labels, 50) == "easy"
    assert order_by_abundance(60, None, 50) == "hard"
    assert PrunedExamples(keep=0.5, order="auto").chosen_order(100, None) == "hard"
    assert PrunedExamples(keep=0.5, order="auto").chosen_order(90, None) == "easy"


def seen(plain: BaseRun, technique: PrunedExamples, steps: int) -> list[Batch]:
    source = compose(plain, with_optimizer([technique]), 6).source
    return [source.at(step) for step in range(steps)]


def test_a_run_trains_on_kept_examples_and_evaluates_on_all(tmp_path: Path) -> None:
    plain = image_run(batch=50)
    scores = scored(plain)
    technique = PrunedExamples(**written(scores, tmp_path / "scores"), keep=0.25, drop_hardest=0.1, min_class_share=0)
    kept = np.arange(1300 - 130 - 325, 1300 - 130)
    contents = plain.source.contents  # type: ignore[attr-defined]
    expected = {image.numpy().tobytes() for image in contents.fields(kept)["inputs"]}
    actual = {image.numpy().tobytes() for batch in seen(plain, technique, 7) for image in batch["inputs"]}
    assert actual == expected and len(expected) > 300
    run = compose(plain, with_optimizer([technique]), 3)
    choice = run.source.selected_subset
    assert choice is not None and choice.kept.tolist() == kept.tolist()
    assert torch.equal(choice.scores, scores.scores)  # type: ignore[arg-type]


def test_texts_are_pruned_alike(tmp_path: Path) -> None:
    plain = plain_run()
    count = plain.source.example_index().count
    technique = PrunedExamples(**written(scored(plain), tmp_path / "scores"), keep=0.1, order="easy")
    source = compose(plain, with_optimizer([technique]), 6).source
    assert source.selected_subset is not None and source.selected_subset.kept.tolist() == list(
        range(round(0.1 * count))
    )
    records, _ = run_through(plain, with_optimizer([technique]), 3)
    assert len(records) == 3


def test_notes_list_kept_classes_and_the_cost_of_scoring(tmp_path: Path) -> None:
    plain = image_run()
    named = {"label_names": tuple(map(str, range(10)))}
    technique = PrunedExamples(**written(scored(plain, **named), tmp_path / "scores"), keep=0.5)
    run = compose(plain, with_optimizer([technique]), 3)
    run.build_model()
    first, by_class, cost = run.notes["data_selection.prune"]
    assert first == "keeps 650 of 1,300 examples, order hard by el2n"
    labels = plain.source.example_index().labels
    assert labels is not None
    zeros = int((labels[650:] == 0).sum())
    assert by_class.startswith(f"kept of each class: 0 {zeros}/{int((labels == 0).sum())}, 1 ")
    assert cost == "scoring cost 2e+09 FLOP and 4 s in 1 run"


def test_scores_of_other_data_are_refused_by_hash(tmp_path: Path) -> None:
    images = image_run()
    other = replace(scored(images).facts, fingerprint="0" * 64)
    wrong = written(replace(scored(images), facts=other), tmp_path / "scores")
    with pytest.raises(
        RefusedError, match=r"data_selection.prune: .* scores 1,300 examples of other data than these 1,300"
    ) as error:
        compose(images, with_optimizer([PrunedExamples(**wrong)]), 3).source.at(0)
    assert "thrifty data score" in error.value.fix
    right = written(scored(images), tmp_path / "right")
    with pytest.raises(RefusedError, match="other data"):
        compose(plain_run(), with_optimizer([PrunedExamples(**right)]), 3).source.at(0)


def test_a_missing_or_wrong_hash_is_refused(tmp_path: Path) -> None:
    named = written(scored(image_run()), tmp_path / "scores")
    for settings, kind, printed in (
        ({"scores": named["scores"]}, UsageError, "have no hash of the score file"),
        ({**named, "sha256": "a" * 64}, IntegrityError, "is not the score file of the recipe"),
        ({**named, "scores": str(tmp_path / "none")}, UsageError, "there is no score file"),
        ({}, UsageError, "requires a score file"),
        ({"order": "random", "drop_hardest": 0.1}, UsageError, "drop_hardest requires a score file"),
    ):
        run = compose(image_run(), with_optimizer([PrunedExamples(**settings)]), 3)
        with pytest.raises(kind, match=printed) as error:
            run.source.at(0)
        assert error.value.fix
    with pytest.raises(UsageError, match=named["sha256"]):
        compose(image_run(), with_optimizer([PrunedExamples(scores=named["scores"])]), 3).source.at(0)


def test_a_trained_model_does_not_require_the_file() -> None:
    run = compose(image_run(), with_optimizer([PrunedExamples(scores="gone", sha256="a" * 64)]), 3)
    run.build_model()
    assert "there is no score file 'gone'" in run.notes["data_selection.prune"][0]


def test_a_file_of_scores_survives_a_round_trip(tmp_path: Path) -> None:
    scores = scored(image_run(), seeds=(3, 4), label_names=("a", "b"), recipe={"seed": 3}, steps=7)
    scores = replace(scores, guesses=PredictedLabels(scores.labels, scores.scores / 1300, scores.scores / 2600))  # type: ignore[arg-type]
    path = tmp_path / "scores"
    path.write_bytes(scores_bytes(scores))
    actual = read_scores(path)
    assert actual.facts == scores.facts
    assert torch.equal(actual.scores, scores.scores) and torch.equal(actual.runs, scores.runs)
    assert scores_bytes(actual) == path.read_bytes()


@pytest.mark.parametrize("damage", ["cut", "no facts", "other shape", "not finite", "format"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    scores = scored(image_run())
    content = scores_bytes(scores)
    if damage == "cut":
        content = content[:-9]
    elif damage == "no facts":
        content = content.replace(b"thrifty-scores", b"thrifty-scorex")
    elif damage == "other shape":
        content = scores_bytes(replace(scores, labels=torch.zeros(3, dtype=torch.int64)))
    elif damage == "not finite":
        content = scores_bytes(replace(scores, scores=scores.scores.log()))
    else:
        content = content.replace(b'\\"format\\": 1', b'\\"format\\": 9')
    path = tmp_path / "scores"
    path.write_bytes(content)
    with pytest.raises(IntegrityError, match="is not a score file"):
        read_scores(path)


def test_suspicion_is_the_margin_of_another_label() -> None:
    guesses = PredictedLabels(torch.tensor([1, 1, 0]), torch.tensor([0.9, 0.9, 0.6]), torch.tensor([0.1, 0.9, 0.3]))
    assert guesses.suspicion(torch.tensor([0, 1, 1])).tolist() == pytest.approx([0.8, 0.0, 0.3])
