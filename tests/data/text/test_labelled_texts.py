"""Labelled texts: columns, forms of labels, held-out rows, and errors."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import labelled_texts
import pytest
from labelled_texts import write_csv, write_jsonl
from tokenizers import Regex, normalizers, pre_tokenizers

from thrifty.core.errors import TYPED, ThriftyError, UsageError
from thrifty.core.model_spec import TextModelSpec
from thrifty.core.recipe import DataSettings, ObjectiveSettings, Recipe
from thrifty.data.text.labelled_data import LabelledData
from thrifty.data.text.labelled_tokens import texts_without_labels
from thrifty.data.tokenizer import read_tokenizer, train_tokenizer
from thrifty.models.hf_folder import write_tokenizer
from thrifty.training.data_opening import open_examples

REVIEWS = labelled_texts.reviews(40)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path / "cache"))


def opened(source: Path | str, objective: str = "classification", printed: list[str] | None = None, **data: Any) -> Any:
    settings = {"batch": 4, "length": 64, "vocabulary": 300, "held_out": 0.25} | data
    recipe = Recipe(data=DataSettings(str(source), **settings), objective=ObjectiveSettings(objective))
    _, found = open_examples(recipe, (printed if printed is not None else []).append)
    assert isinstance(found, LabelledData)
    return found


def shown(data: LabelledData) -> list[tuple[str, str]]:
    """Return texts and labels of the training part, without special tokens."""
    previews = data.previews(range(len(data.contents)))
    return sorted((each.text.replace("<|endoftext|>", ""), each.label) for each in previews)


def texts_of(rows: list[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(row["text"], str(row["label"])) for row in rows}


@pytest.mark.parametrize("form", ["jsonl", "csv", "tsv", "parquet"])
def test_tables_of_every_form_hold_the_same_texts(tmp_path: Path, form: str) -> None:
    odd = [
        {"text": 'she said "so, so"\nand left', "label": "positive"},
        {"text": "naïve façade 🙂 日本語; a,b", "label": "positive"},
    ]
    rows, path = [*REVIEWS, *odd], tmp_path / f"reviews.{form}"
    if form == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif form == "jsonl":
        write_jsonl(path, rows)
    else:
        write_csv(path, rows, "," if form == "csv" else "\t")
    data = opened(path)
    assert data.ends.labels == ("negative", "positive")
    assert set(shown(data)) < texts_of(rows) and len(data.contents) + len(data.held_out) == 42
    assert len(data.held_out) == 11


def test_equal_texts_are_on_one_side_of_the_split(tmp_path: Path) -> None:
    data = opened(write_jsonl(tmp_path / "twice.jsonl", REVIEWS * 3))
    assert len(data.held_out) == 30 and len({text for text, _ in shown(data)}) == 30


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ([0, 1], ("0", "1")),
        (["10", "9"], ("9", "10")),
        ([1.0, 2.0], ("1", "2")),
        ([1, "1", 2.0], ("1", "2")),
        ([True, False], ("false", "true")),
        ([-1, 1], ("-1", "1")),
        (["ü", "a"], ("a", "ü")),
        (["001", "1", "01"], ("001", "01", "1")),
        (["1.0", "0.0", 1], ("0", "1")),
    ],
)
def test_classes_are_names_or_ordered_whole_numbers(tmp_path: Path, values: list, names: tuple[str, ...]) -> None:
    rows = [{"text": row["text"], "label": values[n % len(values)]} for n, row in enumerate(REVIEWS)]
    assert opened(write_jsonl(tmp_path / "rows.jsonl", rows)).ends.labels == names


def test_numbers_are_read_from_text(tmp_path: Path) -> None:
    rows = [{"text": row["text"], "label": f"{n}.5"} for n, row in enumerate(REVIEWS)]
    labels = opened(write_csv(tmp_path / "rows.csv", rows), "regression").train.at(0)["labels"]
    assert labels.dtype.is_floating_point and set(labels.tolist()) <= {n + 0.5 for n in range(40)}


@pytest.mark.parametrize(
    ("label", "objective", "match"),
    [
        (0.5, "classification", r"line 1: column 'label' holds 0.5, a number, not a class"),
        ("0.37", "classification", r"line 1: column 'label' holds 0.37, a number, not a class"),
        (["a", "b"], "classification", r"holds \['a', 'b'\], a list, not a single label"),
        ("good", "regression", "holds 'good', not a number"),
        ("1e999", "regression", "not a finite number"),
        (3, "multi_label_classification", "holds 3, not a list"),
        ([0.0, 1.0, 0.0], "multi_label_classification", r"holds \[0.0, 1.0, 0.0\], a one-hot row"),
        ("1, 0, 1", "multi_label_classification", "a one-hot row without class names"),
        (float("inf"), "classification", "holds inf, a number, not a class"),
        pytest.param(10**400, "regression", "holds 10+, not a number", id="huge"),
    ],
)
def test_label_of_another_form_is_refused_by_its_line(tmp_path: Path, label: Any, objective: str, match: str) -> None:
    rows = [{"text": row["text"], "label": label} for row in REVIEWS]
    with pytest.raises(UsageError, match=match):
        opened(write_jsonl(tmp_path / "rows.jsonl", rows), objective)


@pytest.mark.parametrize(("typed", "fix"), [(True, "--loss regression"), (False, 'loss="regression"')])
def test_fix_for_numeric_labels_suits_the_interface(
    typed: bool, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TYPED, raising=False)
    if typed:
        monkeypatch.setenv(TYPED, "1")
    rows = [{"text": row["text"], "label": 0.5} for row in REVIEWS]
    with pytest.raises(UsageError) as error:
        opened(write_jsonl(tmp_path / "rows.jsonl", rows))
    assert str(error.value).endswith(f"fix: {fix}")


def test_rows_without_a_text_or_a_label_are_left_out_and_counted(tmp_path: Path) -> None:
    empty = [{"text": " ", "label": "positive"}, {"text": "a film", "label": None}, {"text": "a", "label": ""}]
    printed: list[str] = []
    data = opened(write_jsonl(tmp_path / "rows.jsonl", [*empty, *REVIEWS]), printed=printed)
    assert len(data.contents) + len(data.held_out) == 40
    assert any(
        "3 rows without a text or a label are left out" in line and "rows.jsonl, line 1" in line for line in printed
    )


def test_longer_texts_are_cut_and_counted(tmp_path: Path) -> None:
    printed: list[str] = []
    long = [*REVIEWS, {"text": "a film with actors " * 100, "label": "positive"}]
    data = opened(write_jsonl(tmp_path / "rows.jsonl", long), length=16, printed=printed)
    batch = data.train.at(0)
    assert batch["inputs"].shape == (4, 16) and any(
        "are longer than data.length = 16 and are cut" in line for line in printed
    )
    short = opened(write_jsonl(tmp_path / "short.jsonl", REVIEWS), length=512).train.at(0)
    assert short["keep"].sum(1).max() <= short["inputs"].shape[1] < 64


@pytest.mark.parametrize("kind", ["plain", "normalized", "split first", "with spaces"])
def test_exported_tokenizers_of_words_have_training_tokens(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = train_tokenizer([row["text"] for row in REVIEWS] + ["don't (naïve) films"] * 9, 300)
    if kind == "normalized":
        tokenizer.inner.normalizer = normalizers.NFC()
    if kind == "split first":  # as in the tokenizers of Llama 3 and Qwen
        words = pre_tokenizers.Split(Regex(r"'\w| ?\w+| ?[^\s\w]+|\s+"), "isolated")
        tokenizer.inner.pre_tokenizer = pre_tokenizers.Sequence(
            [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    if kind == "with spaces":
        tokenizer.inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    words = ["a", "great", "film", "don't", "(naïve)"]
    spec = TextModelSpec(tokenizer.vocabulary, 64, ("O",))
    trained, _ = texts_without_labels([(words,)], spec, "tags", tokenizer, 64)
    tokenizer.save(tmp_path)
    (tmp_path / "out").mkdir()
    write_tokenizer(tmp_path / "out", tmp_path / "tokenizer.json", 64, "token_classification")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs(words, is_split_into_words=True)["input_ids"] == trained.tokens.tolist()
    assert theirs("a great film")["input_ids"] == theirs(words[:3], is_split_into_words=True)["input_ids"]
    exported = read_tokenizer(tmp_path / "out" / "tokenizer.json")
    again, _ = texts_without_labels([(words,)], spec, "tags", exported, 64)
    assert again.tokens.tolist() == trained.tokens.tolist()


def test_other_column_names_and_missing_columns(tmp_path: Path) -> None:
    rows = [{"body": row["text"], "title": "x", "sentiment": row["label"]} for row in REVIEWS]
    path = write_csv(tmp_path / "rows.csv", rows)
    with pytest.raises(UsageError, match=r"no column of texts; there are: body, title, sentiment") as caught:
        opened(path)
    assert "data.column" in caught.value.fix
    with pytest.raises(UsageError, match="no column of labels; there are: body, title, sentiment") as caught:
        opened(path, column="body")
    assert "data.label_column" in caught.value.fix
    with pytest.raises(UsageError, match="no column 'heading'; there are: body"):
        opened(path, column="body", pair_column="heading", label_column="sentiment")
    data = opened(path, column="body", pair_column="title", label_column="sentiment")
    batch = data.train.at(0)
    assert data.ends.labels == ("negative", "positive") and int(batch["types"].max()) == 1


def test_pair_column_is_combined_with_the_usual_column(tmp_path: Path) -> None:
    rows = [{"sentence": row["text"], "other": "x", "label": row["label"]} for row in REVIEWS]
    path = write_csv(tmp_path / "rows.csv", rows)
    assert "types" not in opened(path).train.at(0).fields
    assert int(opened(path, pair_column="other").train.at(0)["types"].max()) == 1
    with pytest.raises(UsageError, match="no column 'others'; there are: sentence, other, label"):
        opened(path, pair_column="others")


def test_folder_with_held_out_texts(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    write_jsonl(tmp_path / "set" / "train.jsonl", REVIEWS[:30])
    write_csv(tmp_path / "set" / "test.csv", REVIEWS[30:])
    data = opened(tmp_path / "set")
    assert len(data.contents) == 30 and len(data.held_out) == 10
    other = opened(tmp_path / "set" / "train.jsonl", held_out_source=str(tmp_path / "set" / "test.csv"))
    assert other.identity == data.identity


def test_held_out_texts_that_are_training_texts_too_are_counted(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    write_jsonl(tmp_path / "set" / "train.jsonl", REVIEWS[:30])
    for first, share in ((30, ""), (25, "33%")):
        write_jsonl(tmp_path / "set" / "test.jsonl", REVIEWS[first:])
        data = opened(tmp_path / "set", printed=(printed := []))
        cautions = [f"{share} of the held-out text is in the training text too, so the held-out loss is too low"]
        assert [each for each in printed if "training text too" in each] == cautions * bool(share)
        assert data.facts.get("cautions", []) == cautions * bool(share)


def test_held_out_label_without_training_texts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    write_jsonl(tmp_path / "set" / "train.jsonl", REVIEWS[:30])
    write_jsonl(tmp_path / "set" / "dev.jsonl", [*REVIEWS[30:], {"text": "so so", "label": "neutral"}])
    with pytest.raises(UsageError, match=r"dev.jsonl, line 11: no training text has the label 'neutral'"):
        opened(tmp_path / "set")


def test_one_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="every text has the label 'positive'"):
        opened(write_jsonl(tmp_path / "rows.jsonl", [{**row, "label": "positive"} for row in REVIEWS]))


def test_unequal_numbers_of_words_and_labels_are_refused(tmp_path: Path) -> None:
    rows = labelled_texts.tagged(10)
    rows[6]["ner_tags"] = rows[6]["ner_tags"][1:]
    with pytest.raises(UsageError, match=r"line 7: \d words, but \d labels"):
        opened(write_jsonl(tmp_path / "rows.jsonl", rows), "token_classification")


def test_only_the_first_token_of_a_word_has_a_label(tmp_path: Path) -> None:
    rows = [{"tokens": ["unbelievable", "film"], "tags": ["GOOD", "O"]}] * 2 + labelled_texts.tagged(30)
    for row in rows[2:]:
        row["tags"] = row.pop("ner_tags")
    data = opened(write_jsonl(tmp_path / "rows.jsonl", rows), "token_classification", vocabulary=262)
    batch = data.train.at(0)
    words = {" ".join(row["tokens"]): row["tags"] for row in rows}
    for tokens, keep, labels in zip(batch["inputs"], batch["keep"], batch["labels"], strict=True):
        text = data.tokenizer.decode(tokens[keep].tolist()).replace("<|endoftext|>", "").strip()
        assert [data.ends.labels[tag] for tag in labels if tag != -100] == words[text]
        assert (labels != -100).sum() < keep.sum() - 2  # words of several pieces, and special tokens


@pytest.mark.parametrize("form", ["saved", "parquet"])
def test_class_names_of_hugging_face_data_sets(tmp_path: Path, form: str) -> None:
    datasets = pytest.importorskip("datasets")
    names = datasets.ClassLabel(names=["positive", "negative"])
    rows = [{**row, "label": names.str2int(row["label"])} for row in REVIEWS]
    features = datasets.Features({"text": datasets.Value("string"), "label": names})
    whole = datasets.Dataset.from_list([*rows, {"text": "of a test", "label": -1}], features=features)
    if form == "saved":
        splits = {"train": whole.select(range(30)), "test": whole.select(range(30, 41))}
        datasets.DatasetDict(splits).save_to_disk(tmp_path / "set")
        data = opened(tmp_path / "set")
        assert (len(data.contents), len(data.held_out)) == (30, 10)
    else:
        whole.to_parquet(tmp_path / "rows.parquet")
        data = opened(tmp_path / "rows.parquet")
    assert data.ends.labels == ("negative", "positive") and set(shown(data)) < texts_of(REVIEWS)


def test_label_columns_require_labelled_texts(tmp_path: Path) -> None:
    recipe = Recipe(data=DataSettings(str(tmp_path), label_column="label"))
    with pytest.raises(UsageError, match=r"data.label_column is only for labelled texts"):
        open_examples(recipe)


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.csv", "text,label\nso,1,2\n", "line 2: the number of columns differs from the heading"),
        ("a.csv", 'text,label\n"so,1\n', "not a readable table"),
        ("a.csv", "", "no train texts with labels"),
        ("a.csv", "text,label\n", "no train texts with labels"),
        ("a.txt", "so", "has plain text, but the recipe"),
    ],
)
def test_damaged_table_is_refused(tmp_path: Path, name: str, content: str, match: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ThriftyError, match=match):
        opened(tmp_path / name)


def test_invalid_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes("text,label\nnaïve,1\n".encode("latin-1"))
    with pytest.raises(UsageError, match=r"line 2: byte 0xef is not UTF-8 text\n.*iconv -f CP1252"):
        opened(tmp_path / "a.csv")


def test_texts_are_prepared_again_if_labels_change(tmp_path: Path) -> None:
    printed: list[str] = []
    path = write_jsonl(tmp_path / "rows.jsonl", REVIEWS)
    one, again = opened(path, printed=printed), opened(path, printed=printed)
    assert one.identity == again.identity and sum("preparing" in line for line in printed) == 1
    swapped = [{**row, "label": "mixed" if n == 3 else row["label"]} for n, row in enumerate(REVIEWS)]
    other = opened(write_jsonl(path, swapped), printed=printed)
    assert other.ends.labels == ("mixed", "negative", "positive") and sum("preparing" in line for line in printed) == 2
    with pytest.raises(UsageError, match="labels"):
        replace(other, identity={**other.identity, "tokenizer.json": one.identity["tokenizer.json"]}).check_meaning(
            one.identity, tmp_path
        )
