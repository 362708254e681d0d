"""Sources of another kind than a recipe trains on: each is refused with the command that trains on it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from thrifty.core.errors import InfeasibleError, UsageError
from thrifty.core.recipe import DataSettings, ObjectiveSettings, Recipe
from thrifty.data.data_kind import DataKind
from thrifty.recipes import RECIPES
from thrifty.training.data_opening import open_examples

CLASSIFY, ALONE = "masked --data SOURCE --loss classification", "; or --set data.column="


class _OpenedError(Exception):
    pass


@pytest.fixture(autouse=True)
def nothing_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that is accepted raises _OpenedError, so that nothing is tokenized."""

    def opened(self: DataKind, request: object) -> None:
        raise _OpenedError(self.name)

    for kind in DataKind.__subclasses__():
        monkeypatch.setattr(kind, "open", opened)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    (tmp_path / "texts.txt").write_text("The whale swam past.")
    (tmp_path / "texts.csv").write_text("id,text\n1,so\n")
    (tmp_path / "rows.csv").write_text("text,label\nso,good\n")
    (tmp_path / "stars.csv").write_text("review;stars\nso;3\n")
    (tmp_path / "pairs.csv").write_text("source,target\nso,also\n")
    (tmp_path / "captions.jsonl").write_text('{"image": "a.png", "caption": "a whale"}')
    (tmp_path / "chats.jsonl").write_text('{"prompt": "Who?", "completion": "The whale."}')
    (tmp_path / "both.jsonl").write_text('{"prompt": "Who?", "completion": "Ahab.", "text": "Who? Ahab."}')
    (tmp_path / "list.json").write_text(json.dumps([{"messages": [{"role": "user", "content": "Who?"}]}]))
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "train.csv").write_text("sentence,label\nso,good\n")
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "photos" / name / "a.png")
    (tmp_path / "photos" / "README.md").write_text("Two photos.")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "logo.png").write_bytes((tmp_path / "photos" / "cat" / "a.png").read_bytes())
    for number in range(3):
        (tmp_path / "code" / f"{number}.py").write_text("pass")
    return tmp_path


def recipe(name: str, source: Path | str, loss: str = "", column: str = "") -> Recipe:
    chosen = RECIPES[name]()
    chosen = replace(chosen, data=DataSettings(str(source), column=column))
    return replace(chosen, objective=ObjectiveSettings(loss)) if loss else chosen


@pytest.mark.parametrize(
    ("name", "loss", "source", "about", "command"),
    [
        ("text", "", "chats.jsonl", "conversations", "text --data SOURCE --loss chat_answers"),
        ("text", "", "list.json", "conversations", "text --data SOURCE --loss chat_answers"),
        (
            "text",
            "",
            "rows.csv",
            "texts with labels",
            CLASSIFY + ALONE,
        ),
        (
            "text",
            "",
            "stars.csv",
            "texts with labels",
            CLASSIFY + ALONE,
        ),
        (
            "masked",
            "",
            "parts",
            "texts with labels",
            CLASSIFY + ALONE,
        ),
        ("text", "", "pairs.csv", "pairs of texts", "spans --data SOURCE"),
        ("text", "", "captions.jsonl", "images with captions", "flip-emoji --data SOURCE"),
        ("text", "", "photos", "images", "vit-digits --data SOURCE"),
        ("text", "", "digits", "images", "vit-digits --data digits"),
        ("text", "chat_answers", "texts.txt", "plain text", "text --data SOURCE"),
        ("text", "chat_answers", "kjv", "plain text", "text --data kjv"),
        ("masked", "classification", "photos", "images", "vit-digits --data SOURCE"),
        ("masked", "classification", "texts.txt", "plain text", "text --data SOURCE"),
        (
            "spans",
            "",
            "rows.csv",
            "texts with labels",
            CLASSIFY + ALONE,
        ),
        ("vit-digits", "", "texts.txt", "plain text", "text --data SOURCE"),
        ("vit-digits", "", "rows.csv", "texts with labels", CLASSIFY),
        ("mae-digits", "", "chats.jsonl", "conversations", "text --data SOURCE --loss chat_answers"),
        ("flip-emoji", "", "photos", "images", "vit-digits --data SOURCE"),
    ],
)
def test_other_data_are_refused_with_the_right_command(
    name: str, loss: str, source: str, about: str, command: str, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THRIFTY_TYPED", "1")
    path = sources / source if (sources / source).exists() else source
    with pytest.raises(InfeasibleError) as caught:
        open_examples(recipe(name, path, loss), lambda text: None)
    assert caught.value.exit_code == 3
    assert caught.value.what.startswith(f"'{path}' has {about}, but the recipe {name!r} trains on ")
    assert caught.value.fix.startswith(f"thrifty train {command.replace('SOURCE', str(path))}")


def test_a_refusal_in_python_names_the_call(sources: Path) -> None:
    with pytest.raises(InfeasibleError) as caught:
        open_examples(recipe("text", sources / "rows.csv"), lambda text: None)
    assert caught.value.fix == (
        f'thrifty.train(recipe="masked", data="{sources}/rows.csv", loss="classification"); or '
        'settings={"data.column": "text"}, to train on the texts alone'
    )


@pytest.mark.parametrize(
    ("name", "loss", "source", "column", "kind"),
    [
        ("text", "", "texts.txt", "", "text"),
        ("text", "", "texts.csv", "", "text"),
        ("text", "", "code", "", "text"),
        ("text", "", "both.jsonl", "", "text"),
        ("text", "", "rows.csv", "text", "text"),
        ("text", "", "stars.csv", "review", "text"),
        ("text", "", "python-stdlib", "", "text"),
        ("text", "chat_answers", "both.jsonl", "", "chats"),
        ("masked", "classification", "rows.csv", "", "labelled_text"),
        ("masked", "classification", "texts.csv", "", "labelled_text"),  # which names the missing column
        ("spans", "", "pairs.csv", "", "text_pairs"),
        ("spans", "", "texts.txt", "", "text"),
        ("vit-digits", "", "photos", "", "images"),
        ("flip-emoji", "", "captions.jsonl", "", "pairs"),
    ],
)
def test_data_of_the_right_kind_are_opened(
    name: str, loss: str, source: str, column: str, kind: str, sources: Path
) -> None:
    path = sources / source if (sources / source).exists() else source
    with pytest.raises(_OpenedError, match=f"^{kind}$"):
        open_examples(recipe(name, path, loss, column), lambda text: None)


@pytest.mark.parametrize("name", ["text", "masked", "spans", "mass"])
def test_recipes_without_data_require_a_source(name: str) -> None:
    with pytest.raises(UsageError, match=rf"the recipe '{name}' has no data to train on\n.*data=\"my.txt\""):
        open_examples(RECIPES[name](), lambda text: None)


def test_every_source_of_a_mixture_is_checked(sources: Path) -> None:
    names = {str(sources / "texts.txt"): 1.0, str(sources / "chats.jsonl"): 1.0}
    mixed = replace(RECIPES["text"](), data=DataSettings(sources=names))
    with pytest.raises(InfeasibleError, match=r"chats\.jsonl' has conversations"):
        open_examples(mixed, lambda text: None)
