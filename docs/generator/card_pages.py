"""Pages of cards: objectives, accelerator designs and model families; settings with their docstrings."""

import ast
import inspect
import json
import textwrap
from collections.abc import Sequence
from dataclasses import MISSING
from typing import Any

import thrifty
from generator.markdown import Markdown, block, code, join, md, table, toctree
from thrifty.core.card import SECTIONS, read_card
from thrifty.models.families import FAMILIES
from thrifty.models.model_presets import PRESETS
from thrifty.objectives import OBJECTIVES
from thrifty.simulators.accelerator.accelerator_file import machine_names


def card_pages() -> dict[str, str]:
    """Return pages of objectives, accelerator designs and model families, and a page that lists each kind."""
    pages = {}
    objectives = {name: thrifty.show(name, kind="objective") for name in OBJECTIVES}
    designs = {name: thrifty.show(name, kind="design") for name in machine_names()}
    models = {style: next(name for name, shape in PRESETS.items() if shape.style == style) for style in FAMILIES}
    for name, each in objectives.items():
        pages[f"objectives/{name}"] = card_page(
            name, each.card, each.settings, OBJECTIVES[name], md(each.notes), label=f"objective-{name}"
        )
    for name, each in designs.items():
        pages[f"designs/{name}"] = card_page(
            name, each.card, each.settings, None, md(each.notes), label=f"design-{name}"
        )
    presets = thrifty.list("presets")
    for style, preset in models.items():
        sizes = [(code(name), about) for name, about in presets.items() if PRESETS[name].style == style]
        text = thrifty.show(preset, kind="preset").card
        pages[f"models/{style}"] = card_page(
            style, text, (), None, join("## Presets", table(("preset", "size"), sizes))
        )
        pages[f"models/{style}"] = pages[f"models/{style}"].replace(
            "## Settings\n\nThis entry has no settings.\n\n", ""
        )
    for kind, title in (("objectives", "Objectives"), ("designs", "Accelerator designs"), ("models", "Model families")):
        names = [name.partition("/")[2] for name in pages if name.startswith(f"{kind}/")]
        body = [(Markdown(f"[{md(name)}]({name}.md)"), _effect(kind, name)) for name in names]
        pages[f"{kind}/index"] = join(f"# {title}", table(("name", "content"), body), toctree(names))
    return pages


def _effect(kind: str, name: str) -> str:
    if kind == "models":
        return read_card(FAMILIES[name].__doc__).effect
    shown = thrifty.show(name, kind="objective" if kind == "objectives" else "design")
    return read_card(shown.card).effect


def card_page(
    name: str,
    text: str,
    settings: Sequence[dict[str, Any]],
    kind: type | None,
    *more: str,
    command: str = "",
    label: str = "",
) -> str:
    """Return the page of a card: effect, use, sections, `more` and settings.

    `command` is a command line. `label` is the target of links, `[](#label)`; the default is the name.
    """
    card = read_card(text)
    heads = [head for head in SECTIONS if head in card.sections and head not in ("Use", "Paper")]
    sections = [f"**{head}.** {md(card.sections[head])}" for head in heads]
    return join(
        f"({label or name})=",
        f"# {md(card.title or name)}",
        f"`{name}` · {md(card.paper)}" if card.title else f"`{name}`",
        md(card.effect[:1].upper() + card.effect[1:]),
        block("python", card.sections["Use"]) if "Use" in card.sections else "",
        command,
        *sections,
        *more,
        join("## Settings", settings_table(settings, attribute_texts(kind) if kind else {})),
        join("## Paper", md(card.sections["Paper"])) if "Paper" in card.sections else "",
    )


def settings_table(settings: Sequence[dict[str, Any]], texts: dict[str, str]) -> str:
    if not settings:
        return "This entry has no settings."
    defaults = [(each, each["default"]) for each in settings]
    if not any(texts.get(each["name"]) for each in settings):
        return table(
            ("setting", "default", "type"),
            ((code(each["name"]), code(value if value != "" else '""'), each["type"]) for each, value in defaults),
        )
    return table(
        ("setting", "default", "type", "meaning"),
        ((code(each["name"]), _default(value), each["type"], texts.get(each["name"], "")) for each, value in defaults),
    )


def _default(value: object) -> Markdown:
    return Markdown("") if value is MISSING else code(json.dumps(value) if isinstance(value, str) else value)


def attribute_texts(kind: type) -> dict[str, str]:
    """Return the docstrings below the attributes of a class and of its bases, by attribute."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not base.__module__.startswith("thrifty"):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for attribute, after in zip(body.body, body.body[1:], strict=False):
            if isinstance(attribute, ast.AnnAssign) and isinstance(attribute.target, ast.Name):
                value = after.value if isinstance(after, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    texts[attribute.target.id] = " ".join(value.value.split())
    return texts
