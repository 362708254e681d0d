"""Templates of pages: what is put into one is escaped, and a name that it does not know is an error."""

import functools
from importlib import resources

import jinja2

from thrifty.reporting.color_theme import DARK, LIGHT

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""Of a page that fetches nothing and runs no script."""


def environment(*packages: str) -> jinja2.Environment:
    """Over the folders `assets` of packages and of the report; of two templates of one name that of the first package
    counts. All know what `page.html` asks for: the two palettes, the style and the policy of a page without scripts."""
    loader = jinja2.ChoiceLoader(
        [jinja2.PackageLoader(package, "assets") for package in (*packages, "thrifty.reporting")]
    )
    made = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    made.globals |= {"light": LIGHT, "dark": DARK, "style": asset("report.css"), "policy": POLICY}
    return made


@functools.cache
def template(name: str, *packages: str) -> jinja2.Template:
    return environment(*packages).get_template(name)


def asset(name: str, package: str = "thrifty.reporting") -> str:
    return resources.files(package).joinpath("assets", name).read_text(encoding="utf-8")
