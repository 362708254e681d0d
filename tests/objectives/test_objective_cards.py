"""Cards of objectives: recommended settings build the objective, and lines of code run."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from pair_runs import write_crosses

import thrifty
from thrifty.core.card import Card, read_card
from thrifty.objectives import OBJECTIVES, chosen_objective
from thrifty.recipes.recipe_layers import RecipeLayers

SMALL = {"data.batch": 4, "data.length": 32, "data.vocabulary": 300, "evaluation.examples": 4}
WORDS = "the cat sat on the mat and the dog lay by the door of the house"


def card_of(name: str) -> Card:
    return read_card(sys.modules[OBJECTIVES[name].__module__].__doc__)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the files that cards name."""
    folder = tmp_path_factory.mktemp("cards")
    texts = [WORDS[i % 5 :] + WORDS[: i % 7] for i in range(60)]
    (folder / "my.txt").write_text("\n\n".join(f"{text} {i}" for i, text in enumerate(texts * 20)))
    (folder / "pairs.tsv").write_text("".join(f"{text} {i}\t{text[::-1]}\n" for i, text in enumerate(texts * 20)))
    (folder / "reviews.csv").write_text("text,label\n" + "".join(f"{t} {i},{i % 2}\n" for i, t in enumerate(texts)))
    (folder / "similarity.csv").write_text(
        "sentence1,sentence2,label\n" + "".join(f"{t} {i},{t},{i / 10}\n" for i, t in enumerate(texts))
    )
    labels = [["a"], ["a", "b"], ["b"]]
    rows: dict[str, list[dict[str, Any]]] = {
        "topics": [{"text": f"{text} {i}", "label": labels[i % 3]} for i, text in enumerate(texts)],
        "entities": [{"tokens": ["the", f"cat{i}"], "ner_tags": ["O", "B-CAT"]} for i in range(60)],
        "chats": [
            {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": text}]}
            for i, text in enumerate(texts)
        ],
    }
    for name, values in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in values))
    (folder / "captions").mkdir()
    write_crosses(folder / "captions")
    return folder


def test_effects_are_unique() -> None:
    assert len({card_of(name).effect for name in OBJECTIVES}) == len(OBJECTIVES)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_recommended_settings_build_the_objective(name: str) -> None:
    options = shlex.split(card_of(name).start)
    layers = RecipeLayers(thrifty.Recipe())
    assert options[::2] == ["--set"] * (len(options) // 2)
    for assignment in options[1::2]:
        layers.set(assignment)
    assert type(chosen_objective(layers.recipe().objective)) is OBJECTIVES[name]


class ShortRuns:
    """The package `thrifty` with training runs of one step."""

    def __init__(self, runs: Path, **settings: Any):
        self.runs, self.settings = runs, SMALL | settings

    def __getattr__(self, name: str) -> Any:
        return getattr(thrifty, name)

    def train(self, *arguments: Any, budget: str, settings: dict[str, Any] | None = None, **options: Any) -> Any:
        assert budget == "2000 steps"
        settings = self.settings | (settings or {})
        return thrifty.train(*arguments, budget=1, settings=settings, runs=self.runs, **options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_use_lines_run(name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THRIFTY_CACHE", str(folder / "cache"))
    monkeypatch.chdir(tmp_path)
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    images = {"contrastive": {"model.patch": 4, "data.size": 16}}
    lines = card_of(name).sections["Use"]
    assert len(lines.splitlines()) <= 3
    exec(lines, {"thrifty": ShortRuns(tmp_path / "runs", **images.get(name, {}))})  # noqa: S102 - lines of our own cards
