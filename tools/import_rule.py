"""Import rule: the table of DESIGN.md and the finer rules below it, as a contract of import-linter.

`offences` maps sets of pairs (importer, imported) to sentences, so that tests can pass offending imports directly.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import click
from grimp import ImportGraph
from importlinter import Contract, ContractCheck
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from thrifty.cli.verb_list import VERBS

Import = tuple[str, str]
Rule = Mapping[str, frozenset[str]]

DESIGN = Path(__file__).parents[1] / "DESIGN.md"
ASSEMBLERS = {
    f"thrifty.training.{name}" for name in ("trainer", "session_start", "run_setup", "data_opening", "trained_model")
}
ASSEMBLED = {"models", "objectives", "data", "recipes"}


class ImportRule(Contract):
    """Contract of import-linter that reads its rule from DESIGN.md."""

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        broken = offences(imports_of(graph), read_rule(DESIGN.read_text(encoding="utf-8")))
        return ContractCheck(kept=not broken, metadata={"offences": broken})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for sentence in check.metadata["offences"]:
            click.echo(f"- {sentence}")


def imports_of(graph: ImportGraph) -> set[Import]:
    return {(module, other) for module in graph.modules for other in graph.find_modules_directly_imported_by(module)}


def read_rule(text: str) -> dict[str, frozenset[str]]:
    """Read package -> packages it may import, in the table's order; "everything" is every row above it."""
    rule: dict[str, frozenset[str]] = {}
    for row in re.findall(r"^\|(.*)\|$", text.partition("## Import table")[2].partition("\n## ")[0], re.MULTILINE):
        first, _, last = (cell.strip() for cell in row.split("|"))
        if not first.startswith("`"):
            continue
        allowed = set(re.findall(r"`([\w/]+)`", last))
        if "everything" in last:
            allowed = rule.keys() - allowed
        if unknown := sorted(allowed - rule.keys()):
            raise ValueError(f"DESIGN.md: {first} may import {unknown}, which no row above it names")
        rule[first.strip("`")] = frozenset(allowed)
    return rule


def package_of(module: str, rule: Rule) -> str:
    """Return the row of a module: its longest prefix in the table, "" at the top."""
    parts = module.split(".")[1:]
    return next((name for end in (2, 1) if (name := "/".join(parts[:end])) in rule), "")


def offences(imports: Iterable[Import], rule: Rule) -> list[str]:
    """Return a sentence for each import that breaks the rule."""
    imports = sorted(imports)
    broken = [
        f"{importer} imports {imported}: {reason}"
        for importer, imported in imports
        if (reason := _reason(importer, imported, rule))
    ]
    return broken + [f"import circle: {', '.join(circle)}" for circle in circles(imports)]


def circles(imports: Iterable[Import]) -> list[list[str]]:
    """Return the groups of modules that import one another directly or indirectly."""
    imports = list(imports)
    modules = sorted({module for pair in imports for module in pair})
    index = {module: number for number, module in enumerate(modules)}
    rows, columns = [index[one] for one, _ in imports], [index[other] for _, other in imports]
    arrows = coo_array(([1] * len(imports), (rows, columns)), shape=(len(modules), len(modules)))
    _, labels = connected_components(arrows, connection="strong")
    groups: dict[int, list[str]] = {}
    for module, label in zip(modules, labels, strict=True):
        groups.setdefault(label, []).append(module)
    return [group for group in groups.values() if len(group) > 1]


def _reason(importer: str, imported: str, rule: Rule) -> str:
    """Return the reason why a module may not import another, or ""."""
    one, other = package_of(importer, rule), package_of(imported, rule)
    if imported != "thrifty" and one and one != other and not _covered(one, other, rule):
        return f"{one} may not import {other or 'the top'}"
    folder, _, name = imported.rpartition(".")
    private = name.startswith("_") and importer.rpartition(".")[0] == folder
    if name.startswith("_") and not private:
        return f"it is private to {folder}"
    if one == other == "techniques" and not private:
        return "no technique imports another"
    assembled = other.partition("/")[0] in ASSEMBLED and imported != "thrifty.data.prefetch"
    if one == "training" and assembled and importer not in ASSEMBLERS:
        return "the loop knows no models, objectives, data or recipes"
    if one == other == "cli":
        verb, imported_verb = importer.split(".")[2], imported.split(".")[2:3]
        if imported_verb and imported_verb[0] in VERBS and verb != imported_verb[0]:
            return "no verb imports another"
    return ""


def _covered(one: str, other: str, rule: Rule) -> bool:
    """True if a row names a package, or the folder that contains it for modules outside of that folder."""
    parent = other.partition("/")[0]
    return other in rule[one] or (parent in rule[one] and one.partition("/")[0] != parent)
