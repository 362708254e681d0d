"""Templates of pages. Inserted values are escaped, and an unknown name raises an error."""

import functools
from importlib import resources

import jinja2

from thrifty.reporting.color_theme import DARK, LIGHT

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""Content security policy of a page without scripts or external resources."""


def environment(*packages: str) -> jinja2.Environment:
    """Return a template environment over the `assets` folders of `packages` and of this package. If several folders
    contain a template, the first of them is used.

    `page.html` requires the globals of the environment: both palettes, the style, and the policy of a page without
    scripts.
    """
    loader = jinja2.ChoiceLoader(
        [jinja2.PackageLoader(package, "assets") for package in (*packages, "thrifty.reporting")]
    )
    templates = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    templates.globals |= {"light": LIGHT, "dark": DARK, "style": asset("report.css"), "policy": POLICY}
    return templates


@functools.cache
def template(name: str, *packages: str) -> jinja2.Template:
    return environment(*packages).get_template(name)


def asset(name: str, package: str = "thrifty.reporting") -> str:
    return resources.files(package).joinpath("assets", name).read_text(encoding="utf-8")
