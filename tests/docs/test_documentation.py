"""Documentation: pages are complete, their code runs, their links lead somewhere, and it builds without a warning."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from documented_code import code_blocks, run_page, write_files

import thrifty
from generator.card_pages import attribute_texts, settings_table
from generator.markdown import docstring
from generator.python_reference import python_names
from generator.recipe_reference import RECIPE_TABLES, recipe_schema
from thrifty import techniques
from thrifty.cli.verb_list import VERBS
from thrifty.core.technique import Technique
from thrifty.experiments import studies

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if "generated" not in page.parts)
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("desk")
    write_files(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if code_blocks(page)], ids=lambda page: str(page.relative_to(DOCS))
)
def test_every_code_block_of_a_page_runs(page: Path, desk: Path, tmp_path: Path) -> None:
    shutil.copytree(desk, tmp_path / "desk")
    run_page(page, tmp_path / "desk")


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_every_example_runs(example: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, example], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "an example prints its result"


@pytest.mark.slow
def test_the_documentation_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    shutil.copytree(DOCS, tmp_path / "clone" / "docs", ignore=shutil.ignore_patterns("generated"))
    for name in ("results", "examples", "DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        (tmp_path / "clone" / name).symlink_to(ROOT / name)
    built = tmp_path / "html"
    words = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "docs", str(built)]
    done = subprocess.run(words, cwd=tmp_path / "clone", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = {page.relative_to(built).as_posix(): page.read_text(encoding="utf-8") for page in built.rglob("*.html")}
    assert {f"generated/techniques/{name}.html" for name in techniques.names()} <= pages.keys()
    assert {f"generated/studies/{name}.html" for name in studies.names()} <= pages.keys()
    assert all(f"thrifty {verb}" in pages["generated/commands.html"] for verb in VERBS)
    outside = {
        link for text in pages.values() for link in re.findall(r'<(?:script|link|img)[^>]*"(https?://[^"]*)"', text)
    }
    assert not outside, "pages load nothing from the network"


def test_every_block_that_is_not_executed_has_a_reason() -> None:
    blocks = {page: code_blocks(page) for page in PAGES}
    fences = {page: len(re.findall(r"^```(bash|python)$", page.read_text("utf-8"), re.M)) for page in PAGES}
    assert {page: len(found) for page, found in blocks.items()} == fences
    skipped = [block.reason for found in blocks.values() for block in found if block.reason]
    assert all(len(reason.split()) > 3 for reason in skipped) and len(skipped) < 5


def test_links_to_techniques_have_known_names() -> None:
    named = {name for page in PAGES for name in re.findall(r"\]\(#([a-z_]+\.[a-z_]+)\)", page.read_text("utf-8"))}
    assert named and named <= {*techniques.names()}


def test_every_environment_variable_is_documented() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]
    private = {"THRIFTY_STARTED", "THRIFTY_TYPED", "THRIFTY_SAFE"}
    used = {name for text in sources for name in re.findall(r"THRIFTY_[A-Z]+", text)} - private
    documented = set(re.findall(r"`(THRIFTY_[A-Z]+)`", (DOCS / "environment.md").read_text(encoding="utf-8")))
    assert documented == used


def test_a_row_of_a_coming_from_table_is_never_empty() -> None:
    pages = sorted((DOCS / "coming_from").glob("*.md"))
    rows = [
        line.strip("| ").split(" | ")
        for page in pages
        for line in page.read_text("utf-8").splitlines()
        if "|" in line and "---" not in line
    ]
    assert len(pages) == 7 and len(rows) > 150
    assert not [row for row in rows if len(row) != 2 or not all(cell.strip() for cell in row)]
    missing = [row[1] for row in rows if row[1].startswith(("Missing", "Out of scope", "No "))]
    assert all(re.match(r"[\w ]+[:;.] ?\S", cell) for cell in missing), "a missing feature has a reason"


def test_the_python_reference_has_every_public_name() -> None:
    page = python_names()
    names = [name for name in dir(thrifty) if not name.startswith("_")]
    modules = [name for name in names if isinstance(getattr(thrifty, name), ModuleType)]
    assert [
        name for name in names if name not in modules and f"thrifty.{name}" not in page and f"### {name}" not in page
    ] == []
    assert all(f"## thrifty.{name}" in page for name in modules)


def test_the_recipe_reference_has_every_setting() -> None:
    page = recipe_schema()
    for name, kind in RECIPE_TABLES.items():
        section = page.partition(f"## [{name}]")[2].partition("\n## ")[0]
        assert all(f"| `{setting}` |" in section for setting in kind.__dataclass_fields__), name


def test_docstrings_become_lists_and_code() -> None:
    def function() -> None:
        """Return *all* of `x_y`.

        Args:
            name: Name of a run,
                or its folder.

        Example::

            function(name=1)
        """

    text = docstring(function.__doc__)
    assert "Return \\*all\\* of `x_y`." in text
    assert "- `name`: Name of a run, or its folder." in text
    assert "```python\nfunction(name=1)\n```" in text


def test_settings_have_the_docstrings_of_their_attributes() -> None:
    class Own(Technique):
        rank: int = 1
        """Number of rows | columns."""

    assert attribute_texts(thrifty.Lora)["dropout"].startswith("Dropout probability")
    table = settings_table(({"name": "rank", "default": 1, "type": "int"},), {"rank": "rows | columns"})
    assert "| `rank` | `1` | int | rows \\| columns |" in table
