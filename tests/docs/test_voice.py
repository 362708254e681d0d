"""The language of source, help, pages and documents."""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = sorted(
    path for top in ("src", "tests", "benchmarks", "tools", "docs", "examples") for path in (ROOT / top).rglob("*.py")
)
PAGES = [
    *sorted(path for kind in ("html", "js", "toml") for path in (ROOT / "src").rglob(f"*.{kind}")),
    *sorted(ROOT.glob("*.md")),
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if "generated" not in page.parts),
    *sorted((ROOT / "examples").rglob("*.ipynb")),
    *sorted((ROOT / "results").rglob("*.toml")),
    *sorted((ROOT / "results").glob("*.md")),
]
OPENING = re.compile(r"\s*(What|Whether|Of|How|Where|Who|Those|That)\b")
PHRASES = (
    *("goes on", "made again", "without more ado", "is told", "are told", "first values", "by chance"),
    *("which is to say", "of one's own accord", "behind it", "what is in the middle"),
)
PHRASE = re.compile(rf"\b({'|'.join(PHRASES)})\b", re.IGNORECASE)
LONGEST_TEST_NAME = 60
TENSOR_PACKAGES = ("kernels", "objectives", "optim")
SHAPE = re.compile(r"\((\w|…|[·*+/' -])*(, ?(\w|…|[·*+/' -])+)*,?\)|\bscalars?\b|\bshapes?\b")


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield the docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(tree):
        for statement in getattr(node, "body", None) if isinstance(getattr(node, "body", None), list) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value


def retired_openings(source: str) -> list[str]:
    return [text.value for text in docstrings(ast.parse(source)) if OPENING.match(text.value)]


def retired_phrases(source: str) -> list[str]:
    """Return retired phrases in the strings and comments of a Python file."""
    strings = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    prose = [
        *(text for text in strings if isinstance(text, str)),
        *(t.string for t in tokens if t.type == tokenize.COMMENT),
    ]
    return [match[0] for text in prose for match in PHRASE.finditer(" ".join(text.split()))]


def test_no_docstring_has_a_retired_opening() -> None:
    wrong = {str(path.relative_to(ROOT)): retired_openings(path.read_text(encoding="utf-8")) for path in SOURCE}
    assert not {path: texts for path, texts in wrong.items() if texts}


def test_no_string_or_comment_has_a_retired_phrase() -> None:
    sources = [path for path in SOURCE if path != Path(__file__)]
    wrong = {str(path.relative_to(ROOT)): retired_phrases(path.read_text(encoding="utf-8")) for path in sources}
    assert not {path: phrases for path, phrases in wrong.items() if phrases}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_has_a_retired_phrase(page: Path) -> None:
    assert not PHRASE.findall(" ".join(page.read_text(encoding="utf-8").split()))


@pytest.mark.parametrize("opening", ["What", "Whether", "Of", "How", "Where", "Who", "Those", "That"])
def test_a_retired_opening_is_found(opening: str) -> None:
    docstring = f'"""{opening} a module holds."""\n'
    assert retired_openings(docstring)
    assert retired_openings(f"def f():\n    {docstring}") and retired_openings(f"class A:\n    x = 1\n    {docstring}")


@pytest.mark.parametrize("phrase", PHRASES)
def test_a_retired_phrase_is_found(phrase: str) -> None:
    first, _, rest = phrase.partition(" ")
    assert retired_phrases(f'"""The run {phrase}."""') and retired_phrases(f"x = 1  # {phrase}")
    assert retired_phrases(f'x = "{first}\\n{rest}"')


def test_class_names_are_unique() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "src").rglob("*.py")]
    names = Counter(node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    assert not [name for name, count in names.items() if count > 1 and not name.startswith("_")]


def test_names_of_tests_are_short() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "tests").rglob("test_*.py")}
    names = {
        f"{path.relative_to(ROOT)}: {node.name}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and len(node.name) > LONGEST_TEST_NAME
    }
    assert not names


def without_shapes(source: str) -> list[str]:
    """Return public functions with a tensor among their arguments whose docstring has no shape."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return [
        node.name
        for node in functions
        if not node.name.startswith("_")
        and any(ast.unparse(a.annotation or ast.Constant("")) in ("Tensor", "torch.Tensor") for a in node.args.args)
        and not SHAPE.search(ast.get_docstring(node) or "")
    ]


@pytest.mark.parametrize("package", TENSOR_PACKAGES)
def test_public_functions_on_tensors_name_shapes(package: str) -> None:
    files = (ROOT / "src/thrifty" / package).rglob("*.py")
    wrong = {path.name: without_shapes(path.read_text(encoding="utf-8")) for path in files}
    assert not {path: names for path, names in wrong.items() if names}


def test_a_docstring_without_a_shape_is_found() -> None:
    assert without_shapes('def f(x: Tensor) -> Tensor:\n    """Return twice x."""')
    assert not without_shapes('def f(x: Tensor) -> Tensor:\n    """Return twice x (b, t)."""')
