"""Generated pages of the documentation: techniques, studies, measurements, commands, Python names, recipe.

Each page is made from what the package and `results/` contain. A new technique, study, command or finding therefore
appears in the documentation without an edit here. There is one module per kind of page.
"""

from pathlib import Path

from generator.card_pages import card_pages
from generator.command_reference import commands, exit_codes
from generator.documents import DOCUMENTS, document, examples
from generator.negative_results import negative_results
from generator.python_reference import python_names
from generator.recipe_reference import recipe_schema
from generator.study_pages import study_pages, theme_css
from generator.technique_pages import technique_pages

KEPT_SUFFIXES = (".css", ".html", ".json")
"""Suffixes of generated files that are not Markdown: the colors, charts and data of studies."""


def write_pages(folder: Path) -> None:
    """Write all generated pages (MyST) into a folder. Unchanged files keep their times, so that Sphinx skips them."""
    pages = {
        **technique_pages(),
        **card_pages(),
        **study_pages(),
        "negative_results": negative_results(),
        "commands": commands(),
        "python": python_names(),
        "recipe": recipe_schema(),
        "exit_codes": exit_codes(),
        "examples": examples(),
        **{name: document(file) for name, file in DOCUMENTS.items()},
        "theme.css": theme_css(),
    }
    files = {
        folder / (name if Path(name).suffix in KEPT_SUFFIXES else f"{name}.md"): text for name, text in pages.items()
    }
    for file in folder.rglob("*.*"):
        if file not in files:
            file.unlink()
    for file, text in files.items():
        text = text.rstrip() + "\n"
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
