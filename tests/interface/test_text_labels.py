"""Labels of texts and of words: losses are those of transformers, and a trained classifier is what it loads."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import labelled_texts
import numpy as np
import pytest
import torch
from labelled_texts import OUTPUTS, ROWS, save_model, write_jsonl

import thrifty
from thrifty.core.errors import UsageError
from thrifty.core.recipe import Recipe
from thrifty.training.run_setup import prepare_run

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("own_cache")
STEPS, BATCH = 4, 8
ADAMW = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
AUTO = {name: "AutoModelForSequenceClassification" for name in ROWS}
AUTO |= {"token_classification": "AutoModelForTokenClassification"}
PROBLEM = {
    "classification": "single_label_classification",
    "regression": "regression",
    "multi_label_classification": "multi_label_classification",
    "token_classification": None,
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path / "cache"))


def recipe(folder: Path, objective: str, **more: Any) -> Recipe:
    data = write_jsonl(folder.parent / f"{objective}.jsonl", ROWS[objective]())
    constant = [thrifty.AdamW(**ADAMW), *more.pop("techniques", ())]
    made = thrifty.recipe(
        folder,
        data,
        loss=objective,
        techniques=constant,
        budget=STEPS,
        batch=BATCH,
        device="cpu",
        name="labels",
        **more,
    )
    return replace(made, data=replace(made.data, length=24, held_out=0.3), evaluation=replace(made.evaluation, every=2))


def losses_of(run: Any) -> list[float]:
    return [record["loss"] for record in map(json.loads, (run.folder / "records.jsonl").read_text().splitlines())
            if record["kind"] == "step"]  # fmt: skip


SLOW = pytest.mark.slow
CASES = [("bert", "classification"), ("bert", "token_classification"), ("llama", "classification")]
OTHERS = [("bert", "regression"), ("bert", "multi_label_classification"), ("roberta", "classification"),
          ("distilbert", "classification"), ("qwen2", "classification"), ("llama", "regression"),
          ("roberta", "token_classification"), ("distilbert", "regression")]  # fmt: skip
CASES += [pytest.param(*each, marks=SLOW) for each in OTHERS]


@pytest.mark.parametrize(("kind", "objective"), CASES)
def test_losses_are_those_of_transformers_own_fine_tuning(tmp_path: Path, kind: str, objective: str) -> None:
    folder = save_model(tmp_path / "theirs", kind, AUTO[objective], num_labels=OUTPUTS[objective])
    chosen = recipe(folder, objective)
    run = thrifty.train(recipe=chosen, runs=tmp_path / "runs", quiet=True)
    source = prepare_run(chosen).data.train
    model = getattr(transformers, AUTO[objective]).from_pretrained(folder, problem_type=PROBLEM[objective])
    optimizer, expected = torch.optim.AdamW(model.parameters(), **ADAMW), []
    for step in range(STEPS):
        batch = source.at(step)
        given = {"input_ids": batch["inputs"], "attention_mask": batch["keep"].long(), "labels": batch["labels"]}
        if "types" in batch.fields and kind == "bert":
            given["token_type_ids"] = batch["types"]
        loss = model(**given).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    np.testing.assert_allclose(losses_of(run), expected, rtol=2e-4)


@pytest.mark.parametrize("objective", ["classification", "regression"])
def test_texts_and_pairs_have_the_tokens_of_transformers(tmp_path: Path, objective: str) -> None:
    folder = save_model(tmp_path / "theirs", "bert", AUTO[objective], num_labels=OUTPUTS[objective])
    chosen = recipe(folder, objective)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = ROWS[objective]()
    names = ("sentence1", "sentence2") if objective == "regression" else ("text",)
    theirs = tokenizer(*([row[name] for row in rows] for name in names), truncation=True, max_length=24)
    batch = prepare_run(chosen).data.train.at(0)
    ours = [row[keep].tolist() for row, keep in zip(batch["inputs"], batch["keep"], strict=True)]
    assert all(row in theirs["input_ids"] for row in ours)


@pytest.mark.parametrize(
    "objective",
    [
        "classification",
        "token_classification",
        pytest.param("regression", marks=SLOW),
        pytest.param("multi_label_classification", marks=SLOW),
    ],
)
def test_metrics_are_those_of_all_held_out_predictions(tmp_path: Path, objective: str) -> None:
    from scipy import stats
    from sklearn import metrics

    folder = save_model(tmp_path / "theirs", "bert", AUTO[objective], num_labels=OUTPUTS[objective])
    chosen = recipe(folder, objective)
    run = thrifty.train(recipe=chosen, runs=tmp_path / "runs", quiet=True)
    held_out = next(iter(prepare_run(chosen).data.held_out.batches(1000, 1000)))
    with torch.no_grad():
        logits = run.model.eval()(held_out["inputs"], held_out["keep"], held_out.fields.get("types"))
    labels, said = held_out["labels"], run.metrics
    if objective == "regression":
        found = {name: getattr(stats, f"{name}r")(logits[:, 0], labels).statistic for name in ("pearson", "spearman")}
    elif objective == "multi_label_classification":
        chosen_classes, right = (logits > 0).numpy(), labels.numpy() > 0
        found = {"accuracy": metrics.accuracy_score(right, chosen_classes)} | {
            f"f1_{kind}": metrics.f1_score(right, chosen_classes, average=kind, zero_division=0)
            for kind in ("macro", "micro")
        }
    elif objective == "token_classification":
        is_word = labels != -100
        right, said_tags = labels[is_word], logits.argmax(-1)[is_word]
        f1 = {"f1_macro": {"average": "macro"}, "f1_micro": {"average": "micro", "labels": [0, 1]}}
        found = {name: metrics.f1_score(right, said_tags, zero_division=0, **how) for name, how in f1.items()}
        found["accuracy"] = metrics.accuracy_score(right, said_tags)
    else:
        answers = logits.argmax(1)
        found = {
            "accuracy": metrics.accuracy_score(labels, answers),
            "f1": metrics.f1_score(labels, answers),
            "f1_macro": metrics.f1_score(labels, answers, average="macro"),
            "matthews": metrics.matthews_corrcoef(labels, answers),
        }
    assert said == pytest.approx(found, abs=1e-6)


@pytest.mark.parametrize("kind", ["bert", pytest.param("llama", marks=SLOW)])
def test_exported_classifiers_name_labels_in_pipelines(tmp_path: Path, kind: str) -> None:
    folder = save_model(tmp_path / "theirs", kind, "AutoModel")
    run = thrifty.train(recipe=recipe(folder, "classification"), runs=tmp_path / "runs", quiet=True)
    thrifty.export(run, tmp_path / "exported")
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert config["id2label"] == {"0": "negative", "1": "positive"}
    assert config["problem_type"] == "single_label_classification"
    answer = transformers.pipeline("text-classification", str(tmp_path / "exported"), device="cpu", top_k=2)
    text = labelled_texts.reviews()[0]["text"]
    said = {each["label"]: each["score"] for each in answer([text])[0]}
    tokens = torch.tensor([transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"]])
    with torch.no_grad():
        shares = run.model.eval()(tokens, torch.ones_like(tokens).bool()).softmax(-1)[0]
    assert said == pytest.approx({"negative": float(shares[0]), "positive": float(shares[1])}, abs=1e-5)


def test_labels_keep_the_order_and_head_of_their_model(tmp_path: Path) -> None:
    names = {"0": "positive", "1": "neutral", "2": "negative"}
    folder = save_model(tmp_path / "theirs", "bert", AUTO["classification"], id2label=names, label2id={})
    prepared = prepare_run(recipe(folder, "classification"))
    assert prepared.data.ends.labels == ("positive", "neutral", "negative")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    assert torch.equal(prepared.run.plain.build().lm.classifier.weight, theirs.classifier.weight)


@pytest.mark.parametrize("objective", ["classification", "multi_label_classification"])
def test_numbered_labels_keep_the_names_of_their_model(tmp_path: Path, objective: str) -> None:
    names = {"0": "negative", "1": "positive"}
    folder = save_model(tmp_path / "theirs", "bert", AUTO["classification"], id2label=names, label2id={})
    chosen = recipe(folder, objective)
    for numbers, expected in (((0, 1), ("negative", "positive")), ((1, 2), ("1", "2")), ((0, 2), ("0", "2"))):
        labels = [numbers, numbers[:1]] if objective.startswith("multi") else numbers
        rows = [{**row, "label": labels[n % 2]} for n, row in enumerate(labelled_texts.reviews())]
        write_jsonl(Path(chosen.data.source), rows)
        prepared = prepare_run(chosen)
        assert prepared.data.ends.labels == expected
        assert {*prepared.data.contents.label_of(0).split(", ")} <= {*expected}


def test_the_usual_names_of_numbered_labels_are_their_numbers(tmp_path: Path) -> None:
    names = {"0": "LABEL_0", "1": "LABEL_1"}
    folder = save_model(tmp_path / "theirs", "bert", AUTO["classification"], id2label=names, label2id={})
    chosen = recipe(folder, "classification")
    write_jsonl(Path(chosen.data.source), [{**row, "label": n % 2} for n, row in enumerate(labelled_texts.reviews())])
    assert prepare_run(chosen).data.ends.labels == ("0", "1")


def test_other_label_names_are_not_taken_from_a_model(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "bert", AUTO["classification"])
    config, chosen = json.loads((folder / "config.json").read_text()), recipe(folder, "classification")
    (folder / "config.json").write_text(json.dumps(config | {"id2label": {"a": "positive", "b": "negative"}}))
    assert prepare_run(chosen).data.ends.labels == ("negative", "positive")
    (folder / "config.json").write_text(json.dumps(config | {"id2label": {"0": "negative", "1": "negative"}}))
    write_jsonl(Path(chosen.data.source), [{**row, "label": "negative"} for row in labelled_texts.reviews()])
    with pytest.raises(UsageError, match="every text has the label 'negative'"):
        prepare_run(chosen)


def test_new_heads_train_with_lora_and_are_exported(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "theirs", "bert", "AutoModelForMaskedLM")
    chosen = recipe(folder, "classification", techniques=["lora"])
    run = thrifty.train(recipe=chosen, runs=tmp_path / "runs", quiet=True)
    trained = {name for name, parameter in run.model.named_parameters() if parameter.requires_grad}
    assert {"lm.classifier.weight", "lm.classifier.bias", "lm.bert.pooler.dense.weight"} <= trained
    assert not any("lora" in name for name in trained if "classifier" in name)
    start = prepare_run(chosen).run.build_model([])
    assert not torch.equal(dict(start.named_parameters())["lm.classifier.weight"], run.model.lm.classifier.weight)
    thrifty.export(run, tmp_path / "exported")
    assert transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported").num_labels == 2


def test_exports_name_their_class_and_can_be_trained_again(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "theirs", "bert", "AutoModelForSequenceClassification")
    run = thrifty.train(recipe=recipe(folder, "token_classification"), runs=tmp_path / "runs", quiet=True)
    thrifty.export(run, tmp_path / "exported")
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert config["architectures"] == ["BertForTokenClassification"]
    again = thrifty.recipe(tmp_path / "exported", tmp_path / "token_classification.jsonl")
    assert again.objective.name == "token_classification"


def test_a_preset_of_ours_becomes_a_classifier(tmp_path: Path) -> None:
    chosen = recipe(save_model(tmp_path / "unused", "bert", "AutoModel"), "classification")
    sizes = thrifty.recipe("llama-nano").model
    data = replace(chosen.data, tokenizer="", vocabulary=300)
    chosen = replace(chosen, model=replace(sizes, width=16, heads=2, depth=1), data=data)
    run = thrifty.train(recipe=chosen, runs=tmp_path / "runs", quiet=True)
    assert type(run.model.lm).__name__ == "LlamaForSequenceClassification" and run.model.lm.config.pad_token_id == 1
    thrifty.export(run, tmp_path / "exported")
    assert transformers.pipeline("text-classification", str(tmp_path / "exported"), device="cpu")("great film")


def test_python_datasets_with_an_objective_are_labelled_texts(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    names = datasets.ClassLabel(names=["negative", "positive"])
    rows = [{**row, "label": names.str2int(row["label"])} for row in labelled_texts.reviews()]
    features = datasets.Features({"text": datasets.Value("string"), "label": names})
    whole = datasets.Dataset.from_list(rows, features=features)
    folder = save_model(tmp_path / "theirs", "bert", AUTO["classification"], num_labels=2)
    mine = thrifty.recipe(
        folder, whole.select(range(40)), held_out=whole.select(range(40, 60)), loss="classification", budget="1 epoch",
        batch=BATCH, device="cpu", name="own",
    )  # fmt: skip
    run = thrifty.train(recipe=mine, runs=tmp_path / "runs", quiet=True)
    assert run.records()["step"].max() == 5 and 0 <= run.metrics["f1"] <= 1
    assert prepare_run(mine).data.ends.labels == ("negative", "positive")


def test_own_modules_receive_tokens_and_a_mask(tmp_path: Path) -> None:
    class Bag(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = torch.nn.Embedding(300, 16), torch.nn.Linear(16, 2)

        def forward(self, tokens: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            kept = self.embedding(tokens) * keep[..., None]
            return self.head(kept.sum(1) / keep.sum(1, keepdim=True))

    made = thrifty.recipe(
        Bag, write_jsonl(tmp_path / "reviews.jsonl", labelled_texts.reviews()), loss="classification", batch=BATCH,
        budget="60 steps", device="cpu", name="bag", techniques=[thrifty.AdamW(lr=3e-2)],
    )  # fmt: skip
    made = replace(made, data=replace(made.data, vocabulary=300, held_out=0.3))
    assert thrifty.train(recipe=made, runs=tmp_path / "runs", quiet=True).metrics["accuracy"] > 0.9


@pytest.mark.parametrize("objective", ROWS)
def test_the_folder_of_a_classifier_brings_its_objective(tmp_path: Path, objective: str) -> None:
    problem = {"problem_type": PROBLEM[objective]} if objective == "multi_label_classification" else {}
    folder = save_model(tmp_path / "theirs", "bert", AUTO[objective], num_labels=OUTPUTS[objective], **problem)
    data = write_jsonl(tmp_path / "rows.jsonl", ROWS[objective]())
    made = thrifty.recipe(folder, data, held_out=data)
    assert made.objective.name == objective and made.data.held_out_source == str(data)
    assert made.data.tokenizer == str(folder / "tokenizer.json")


def test_blocks_of_a_decoder_run_again_since_it_keeps_no_cache(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "theirs", "llama", AUTO["classification"], num_labels=2)
    plain, again = (
        thrifty.train(recipe=recipe(folder, "classification", techniques=more), runs=tmp_path / name, quiet=True)
        for name, more in {"plain": (), "again": ("recompute",)}.items()
    )
    assert losses_of(plain) == losses_of(again)


def test_metrics_that_an_objective_would_not_compute_are_refused(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", labelled_texts.reviews())
    made = thrifty.recipe("bert-nano", data, loss="classification", metrics={"share": lambda model, batch: 1.0})
    with pytest.raises(UsageError, match="metrics= was passed, but the objective classification has its own metrics"):
        prepare_run(made)


@SLOW
@pytest.mark.parametrize("objective", ["classification", "token_classification"])
def test_two_ranks_report_the_losses_and_metrics_of_one(tmp_path: Path, objective: str) -> None:
    folder = save_model(tmp_path / "theirs", "bert", AUTO[objective], num_labels=OUTPUTS[objective])
    chosen = recipe(folder, objective)
    one = thrifty.train(recipe=chosen, runs=tmp_path / "one", quiet=True)
    two = thrifty.train(recipe=chosen, runs=tmp_path / "two", quiet=True, ranks=2)
    np.testing.assert_allclose(losses_of(one), losses_of(two), rtol=1e-5)
    assert one.metrics == pytest.approx(two.metrics, abs=1e-6)


@SLOW
@pytest.mark.parametrize("objective", ROWS)
def test_a_stopped_run_resumes_to_the_same_bits(tmp_path: Path, objective: str) -> None:
    folder = save_model(tmp_path / "theirs", "bert", AUTO[objective], num_labels=OUTPUTS[objective])
    chosen = recipe(folder, objective, techniques=["lora"])
    whole = thrifty.train(recipe=chosen, runs=tmp_path / "whole", quiet=True)
    for record in thrifty.steps(chosen, runs=tmp_path / "parts"):
        if record.step == 1:
            break
    parts = thrifty.resume(tmp_path / "parts" / "labels", quiet=True)
    assert losses_of(whole) == losses_of(parts) and whole.metrics == parts.metrics
    assert all(map(torch.equal, whole.model.state_dict().values(), parts.model.state_dict().values()))
