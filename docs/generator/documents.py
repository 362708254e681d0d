"""Documents and examples of the repository as pages."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

from generator.markdown import Markdown, block, docstring, join, md, table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
DOCUMENTS = {
    "design": "DESIGN.md",
    "contributing": "CONTRIBUTING.md",
    "changelog": "CHANGELOG.md",
    "studies_summary": "results/studies.md",
    "memory_counting": "results/memory_counting.md",
    "cpu_steps": "results/cpu_steps.md",
    "technique_table": "results/technique_table.md",
    "results": "results/README.md",
}
"""Documents of the repository that are pages too: name of the page and file."""


def document(file: str) -> str:
    """Return a document with links to pages; a link to a file without a page becomes the path of the file."""
    pages = {path: f"{name}.md" for name, path in DOCUMENTS.items()}
    folder = Path(file).parent

    def link(match: re.Match[str]) -> str:
        path = (folder / match[2]).as_posix()
        return f"[{match[1]}]({pages[path]})" if path in pages else f"`{path}`"

    text = (ROOT / file).read_text(encoding="utf-8")
    return re.sub(r"\[([^\]]+)\]\((?!http)([^)#]+)\)", link, text)


def examples() -> str:
    """Return the notebooks in `examples/`, for download, and its scripts with their descriptions."""
    parts = ["# Examples", "Each notebook and script runs in about a minute on two cores and downloads nothing."]
    parts.append(table(("notebook", "content"), notebooks()))
    for file in sorted((ROOT / "examples").glob("*.py")):
        script = file.read_text(encoding="utf-8")
        about, _, rest = (ast.get_docstring(ast.parse(script)) or "").partition("\n\n")
        code = script.partition('"""\n\n')[2]
        parts += [
            f"## {md(file.name)}",
            md(about),
            docstring(rest.partition("\n\n")[2]),
            block("python", code.rstrip()),
        ]
    return join(*parts)


def notebooks() -> Iterator[tuple[Markdown, Markdown]]:
    """Yield a link to each notebook, named by its title, and its first paragraph."""
    for file in sorted((ROOT / "examples" / "notebooks").glob("*.ipynb")):
        cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
        title, about = "".join(cells[0]["source"]).removeprefix("# ").split("\n\n")[:2]
        link = f"{{download}}`{title} <../../examples/notebooks/{file.name}>`"
        yield Markdown(link), Markdown(" ".join(about.split()))
