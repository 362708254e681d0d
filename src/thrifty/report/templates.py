"""Templates of pages: what is put into one is escaped, and a name that it does not know is an error."""

import functools

import jinja2


def environment(*packages: str) -> jinja2.Environment:
    """Over the folders `assets` of packages; of two templates of one name that of the first package counts."""
    loader = jinja2.ChoiceLoader([jinja2.PackageLoader(package, "assets") for package in packages])
    return jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)


@functools.cache
def template(name: str, *packages: str) -> jinja2.Template:
    """`packages`: those of the report if none are given."""
    return environment(*(packages or ("thrifty.report",))).get_template(name)
