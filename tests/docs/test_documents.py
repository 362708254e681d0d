"""Commands and code in documents: every command and every snippet of the README runs."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import CommandLine
from labelled_texts import save_model, text

from thrifty.cli.verb_list import VERBS
from thrifty.objectives import OBJECTIVES

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DESIGN = (ROOT / "DESIGN.md").read_text(encoding="utf-8")

SMALL = [
    *("--budget", "4steps", "--set", "checkpoints.every=2", "--set", "evaluation.examples=4"),
    *("--model", "llama-nano", "--set", "model.width=32", "--set", "model.depth=2", "--set", "model.heads=4"),
    *(
        "--set",
        "data.vocabulary=300",
        "--set",
        "data.length=32",
        "--without",
        "compile",
        "--without",
        "attention.tiled",
    ),
]
"""Options of the README's training, so that it runs in seconds."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.S)


def commands() -> list[list[str]]:
    lines = [line.partition("  #")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    return [shlex.split(line) for line in lines if line]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("desk")
    (folder / "my.txt").write_text("\n\n".join(Path(subprocess.__file__).read_text(encoding="utf-8").split("\n\n")))
    classifier = {"id2label": {"0": "negative", "1": "positive"}, "label2id": {"negative": 0, "positive": 1}}
    save_model(folder / "bert-folder", "bert", "AutoModelForSequenceClassification", **classifier)
    rows = [f'"{text(n, n % 2)}",{n % 2}' for n in range(80)]
    (folder / "reviews.csv").write_text("\n".join(["text,label", *rows]))
    return folder


@pytest.mark.slow
def test_every_command_of_the_readme_runs_in_order(desk: Path) -> None:
    own = CommandLine(desk)
    environment = own.variables() | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    typed = [words for words in commands() if words[0] == "thrifty"]
    for words in typed:
        if words[1] == "train":
            words = words[: words.index("--budget")] + SMALL
        if words[1] == "resume":
            words = [*words[:-1], "+4steps"]
        done = subprocess.run(words, cwd=desk, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
    assert len(typed) >= 5


def test_every_target_of_the_readme_is_in_the_makefile() -> None:
    targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), flags=re.M)
    assert {words[1] for words in commands() if words[0] == "make"} <= {*targets}


@pytest.mark.slow
@pytest.mark.parametrize("snippet", blocks("python"), ids=lambda snippet: snippet.splitlines()[0])
def test_every_snippet_of_the_readme_runs(snippet: str, desk: Path) -> None:
    snippet = snippet.replace('"500 steps"', '"20 steps"')
    done = subprocess.run([sys.executable, "-c", snippet], cwd=desk, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_every_verb_has_a_file_and_a_short_help() -> None:
    verbs = {path.stem for path in (ROOT / "src/thrifty/cli").iterdir()}
    assert set(VERBS) <= verbs and all(help.about and help.example for help in VERBS.values())


def test_the_readme_has_two_screens() -> None:
    assert len(README.splitlines()) <= 120 and len(README.split()) <= 900


@pytest.mark.parametrize("document", ["README.md", "DESIGN.md", "CONTRIBUTING.md"])
def test_every_link_to_a_file_leads_to_one(document: str) -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / document).read_text(encoding="utf-8"))
    assert all((ROOT / link).exists() for link in links), links


def test_every_file_that_prose_names_is_there() -> None:
    """In documents, docstrings and comments: a file that moved has taken its mentions along."""
    pages = [*(ROOT / "src").rglob("*.py"), *(ROOT / name for name in ("README.md", "DESIGN.md", "CONTRIBUTING.md"))]
    there = {path.name for top in ("src", "tests", "tools", "benchmarks") for path in (ROOT / top).rglob("*.py")}
    gone = {
        f"{page.relative_to(ROOT)}: {name}"
        for page in pages
        for quoted in re.findall("`([^`\n]+)`", page.read_text(encoding="utf-8"))
        for name in re.findall(r"\b\w+\.py\b", quoted)
        if name not in {*there, "_name.py"}
    }
    assert not gone


def test_every_noun_of_the_design_is_in_the_files_beside_it() -> None:
    table = re.findall(r"^\| (.+?) \| (.+?) \|", DESIGN.partition("## Technique methods")[0], flags=re.M)[2:]
    assert len(table) > 20
    for nouns, places in table:
        paths = [ROOT / "src/thrifty" / place for place in re.findall("`([^`]+)`", places)]
        files = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])]
        source = "\n".join(file.read_text(encoding="utf-8") for file in files)
        for noun in re.findall("`([^`]+)`", nouns):
            assert re.search(rf"^((class|def) {noun}\b|{noun} = )", source, flags=re.M), (noun, places)


def test_a_setting_of_objectives_says_of_which_by_their_names() -> None:
    source = (ROOT / "src/thrifty/core/recipe.py").read_text(encoding="utf-8")
    settings = source.partition("class ObjectiveSettings:")[2].partition("\n\n\n")[0]
    named = re.findall(r"(?:\"\"\"|; |;\n {4})(\w+):", settings)
    assert len(named) > 8 and set(named) <= set(OBJECTIVES)
