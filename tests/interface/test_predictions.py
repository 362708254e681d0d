"""`predict`: labels of new texts and images, compared with transformers on the export."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from labelled_texts import OUTPUTS, ROWS, save_model, write_csv, write_jsonl
from tokenizers import Tokenizer, normalizers

import thrifty
from thrifty.core.errors import UsageError

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("own_cache")
AUTO = {name: "AutoModelForSequenceClassification" for name in ROWS}
AUTO |= {"token_classification": "AutoModelForTokenClassification"}
COLUMNS = {"regression": ("sentence1", "sentence2"), "token_classification": ("tokens",)}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path / "cache"))


def trained(folder: Path, objective: str, kind: str = "bert", adapter: str = "") -> Any:
    model = save_model(folder / "model", kind, AUTO[objective], num_labels=OUTPUTS[objective])
    data = write_jsonl(folder / "data.jsonl", ROWS[objective]())
    settings = {"data.length": 24}
    techniques = [thrifty.AdamW(lr=1e-2), *([adapter] if adapter else [])]
    return thrifty.train(
        model,
        data,
        loss=objective,
        budget=6,
        settings=settings,
        techniques=techniques,
        runs=folder / "runs",
        quiet=True,
    )


def examples(objective: str, count: int = 70) -> list[Any]:
    names = COLUMNS.get(objective, ("text",))
    rows = [[row[name] for name in names] for row in ROWS[objective](count)]
    return [tuple(row) if len(row) > 1 else row[0] for row in rows]


@pytest.mark.parametrize("kind", ["bert", pytest.param("llama", marks=pytest.mark.slow)])
def test_class_probabilities_are_those_of_the_export(tmp_path: Path, kind: str) -> None:
    run, texts = trained(tmp_path, "classification", kind), examples("classification")
    found = thrifty.predict(run, texts)
    thrifty.export(run, tmp_path / "exported")
    pipeline = transformers.pipeline("text-classification", str(tmp_path / "exported"), device="cpu", top_k=2)
    for row, theirs in zip(found.rows, pipeline(texts), strict=True):
        assert row.probabilities == pytest.approx({each["label"]: each["score"] for each in theirs}, abs=1e-5)
    assert found.labels == [max(row.probabilities, key=row.probabilities.__getitem__) for row in found.rows]
    assert thrifty.predict(run, texts[:1]).rows[0].probabilities == pytest.approx(found.rows[0].probabilities, abs=1e-6)


@pytest.mark.parametrize("objective", ["regression", "multi_label_classification", "token_classification"])
def test_numbers_and_several_labels_are_those_of_the_export(tmp_path: Path, objective: str) -> None:
    run, inputs = trained(tmp_path, objective), examples(objective)
    found = thrifty.predict(run, inputs).labels
    thrifty.export(run, tmp_path / "exported")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    model = getattr(transformers, AUTO[objective]).from_pretrained(tmp_path / "exported").eval()
    names = model.config.id2label
    for example, label in zip(inputs, found, strict=True):
        texts = example if isinstance(example, tuple) else (example,)
        encoded = tokenizer(*texts, return_tensors="pt", is_split_into_words=isinstance(example, list))
        with torch.no_grad():
            logits = model(**encoded).logits[0]
        if objective == "regression":
            assert label == pytest.approx(logits.item(), abs=1e-5)
        elif objective == "multi_label_classification":
            assert label == [names[n] for n, logit in enumerate(logits.tolist()) if logit > 0]
        else:
            words = encoded.word_ids()
            first = [words.index(number) for number in range(len(example))]
            assert label == [names[n] for n in logits[first].argmax(-1).tolist()]


def test_each_word_has_a_label_or_none_without_tokens(tmp_path: Path) -> None:
    run = trained(tmp_path, "token_classification")
    blank, plain = thrifty.predict(run, [["great", " ", "awful"], ["great", "awful"]]).labels
    assert blank == [plain[0], None, plain[1]] and None not in plain
    found = thrifty.predict(run, [["film"] * 30, ["film"]])
    assert [row.cut for row in found.rows] == [True, False]
    assert None not in found.labels[0][:22] and found.labels[0][22:] == [None] * 8  # two of 24 tokens are special
    assert "1 of 2 texts are longer than data.length and are cut" in str(found)


def test_the_card_of_an_adapter_loads_it(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    run, texts = trained(tmp_path, "classification", adapter="lora:rank=2"), examples("classification", 5)
    thrifty.export(run, tmp_path / "adapter", part="adapter")
    card = (tmp_path / "adapter" / "README.md").read_text()
    code = card.split("## Use")[1].split("```python\n")[1].split("```")[0]
    made: dict[str, Any] = {}
    exec(code.replace('"adapter"', repr(str(tmp_path / "adapter"))), made)  # noqa: S102
    assert isinstance(made["model"], peft.PeftModel)
    pipeline = transformers.pipeline("text-classification", made["model"], tokenizer=made["tokenizer"], device="cpu")
    assert [each["label"] for each in pipeline(texts)] == thrifty.predict(run, texts).labels


def test_tokenizers_of_exports_mark_second_texts(tmp_path: Path) -> None:
    run, (pair, *_) = trained(tmp_path, "regression", adapter="lora:rank=2"), examples("regression", 1)
    types = []
    for part in ("adapter", None):
        thrifty.export(run, tmp_path / str(part), part=part)
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / str(part))
        types.append(tokenizer(*pair)["token_type_ids"])
    assert types[0] == types[1] and set(types[0]) == {0, 1}


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_exports_of_text_runs_keep_settings_of_their_base(tmp_path: Path, kind: str) -> None:
    base = save_model(tmp_path / "base", kind, "AutoModelForCausalLM")
    config = json.loads((base / "tokenizer_config.json").read_text())
    template = "{% for message in messages %}{{ message['content'] + eos_token }}{% endfor %}"
    config |= {"bos_token": "[CLS]", "eos_token": {"content": "[SEP]"}, "chat_template": template}
    (base / "tokenizer_config.json").write_text(json.dumps(config | {"padding_side": "left"}))
    stops = {"do_sample": True, "temperature": 0.6, "bos_token_id": 1, "eos_token_id": [2, 3]}
    (base / "generation_config.json").write_text(json.dumps(stops))
    (tmp_path / "text.txt").write_text("a great film with actors and naïve fine film. " * 4000)
    run = thrifty.train(
        base, tmp_path / "text.txt", budget=1, batch=2, settings={"data.length": 16}, runs=tmp_path / "runs", quiet=True
    )
    thrifty.export(run, tmp_path / "out")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("[CLS]", "[SEP]", "[PAD]")
    assert tokenizer.chat_template == template and tokenizer.padding_side == "left"
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (model.config.bos_token_id, model.config.eos_token_id) == (1, 2)
    assert model.generation_config.temperature == 0.6 and model.generation_config.eos_token_id == [2, 3]


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_ids_of_the_base_are_not_for_another_tokenizer(tmp_path: Path, kind: str) -> None:
    base = save_model(tmp_path / "base", kind, "AutoModelForCausalLM")
    stated = {"temperature": 0.6, "do_sample": True, "pad_token_id": 900, "suppress_tokens": [901]}
    (base / "generation_config.json").write_text(json.dumps(stated))
    (tmp_path / "text.txt").write_text("a great film with actors and fine film. " * 4000)
    other = Tokenizer.from_file(str(base / "tokenizer.json"))
    other.normalizer = normalizers.Lowercase()
    other.save(str(tmp_path / "tokenizer.json"))
    settings = {"data.length": 16, "data.tokenizer": str(tmp_path / "tokenizer.json")}
    run = thrifty.train(
        base, tmp_path / "text.txt", budget=1, batch=2, settings=settings, runs=tmp_path / "runs", quiet=True
    )
    thrifty.export(run, tmp_path / "out")
    exported = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert not exported.keys() & stated.keys()
    assert exported["eos_token_id"] == other.token_to_id("[SEP]")


@pytest.mark.parametrize("objective", sorted(ROWS))
def test_files_are_read_like_the_training_data(tmp_path: Path, objective: str) -> None:
    run, rows = trained(tmp_path, objective), ROWS[objective](9)
    names = COLUMNS.get(objective, ("text",))
    plain = [{name: row[name] for name in names} for row in rows]  # new texts have no labels
    expected = thrifty.predict(run, examples(objective, 9)).labels
    assert thrifty.predict(run, write_jsonl(tmp_path / "new.jsonl", plain)).labels == expected
    if objective != "token_classification":
        other = [{f"my_{name}": value for name, value in row.items()} for row in plain]
        file = write_csv(tmp_path / "new.csv", other)
        chosen = dict(zip(("column", "pair_column"), (f"my_{name}" for name in names), strict=False))
        assert thrifty.predict(run, file, **chosen).labels == expected
        with pytest.raises(UsageError, match=r"no column of texts; there are: my_"):
            thrifty.predict(run, file)


def test_a_text_file_has_one_prediction_per_line(tmp_path: Path) -> None:
    run, texts = trained(tmp_path, "classification"), ["a great film\u2028and actors", "awful\x0bdull", "fine"]
    file = tmp_path / "new.txt"
    file.write_text("\r\n".join(texts), encoding="utf-8-sig")
    found = thrifty.predict(run, file)
    assert [row.example for row in found.rows] == texts and found.labels == thrifty.predict(run, texts).labels
    file.write_text("\n".join([*texts, " ", "", ""]), encoding="utf-8")
    assert thrifty.predict(run, file).labels == found.labels
    file.write_text("great\n \nawful\n")
    with pytest.raises(UsageError, match="line 2 is blank") as refused:
        thrifty.predict(run, file)
    assert refused.value.fix == f"delete the blank lines of {file}"
    file.write_text("great\n", encoding="utf-16")
    with pytest.raises(UsageError, match="line 1: UTF-16 text, not UTF-8 text"):
        thrifty.predict(run, file)


def test_images_of_a_folder_are_classified(tmp_path: Path) -> None:
    from PIL import Image

    for number in range(60):
        colour = ("red", "blue")[number % 2]
        folder = tmp_path / "images" / colour
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (200 + number % 40, 0, 0) if colour == "red" else (0, 0, 200)).save(
            folder / f"{number}.png"
        )
    run = thrifty.train(
        "vit-nano",
        tmp_path / "images",
        loss="classification",
        budget=20,
        techniques=[thrifty.AdamW(lr=1e-3)],
        settings={"data.batch": 8, "model.patch": 4, "data.size": 16},
        runs=tmp_path / "runs",
        quiet=True,
    )
    found = thrifty.predict(run, tmp_path / "images")
    assert [row.label for row in found.rows] == [row.example.parent.name for row in found.rows]
    (tmp_path / "images" / "red" / "._1.png").write_bytes(b"hidden file of another system")
    assert thrifty.predict(run, tmp_path / "images").labels == found.labels
    assert thrifty.predict(run, [str(found.rows[0].example)]).labels == found.labels[:1]
    with pytest.raises(UsageError, match="not a file"):
        thrifty.predict(run, ["nowhere.png"])


def test_other_examples_and_other_runs_are_refused(tmp_path: Path) -> None:
    run = trained(tmp_path, "classification")
    for wrong, why in (
        ("a text", "one text, not a list"),
        ([3], "example 0 is 3, not a text"),
        (["a", ["b", "c"]], "example 1 is"),
        ([], "no examples"),
        (tmp_path / "nowhere.csv", "does not exist"),
    ):
        with pytest.raises(UsageError, match=why):
            thrifty.predict(run, wrong)
    (tmp_path / "some.txt").write_text("the whale and the ship. " * 4000)
    language = thrifty.train(
        "llama-nano", tmp_path / "some.txt", budget=1, batch=2, runs=tmp_path / "runs", quiet=True, name="language"
    )
    with pytest.raises(UsageError, match="predicts no labels") as refused:
        thrifty.predict(language, ["a text"])
    assert "sample" in refused.value.fix
