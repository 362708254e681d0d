"""Cards of techniques: one shape, settings that build, code that runs, evidence that is found."""

import inspect
import json
import re
import socket
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, get_args

import card_models
import pytest
import torch
from tools.catalog import FILE, catalog_text

import thrifty
from thrifty import techniques
from thrifty.core.card import SECTIONS, Card, read_card
from thrifty.core.errors import UsageError
from thrifty.core.mesh import clear_mesh
from thrifty.core.setting_bounds import hints_of
from thrifty.experiments.evidence import evidence_by_technique
from thrifty.experiments.findings import Aspect, read_findings
from thrifty.interface.catalog import catalog
from thrifty.interface.own_loop import technique_of
from thrifty.models.families import FAMILIES
from thrifty.models.model_presets import PRESETS
from thrifty.objectives import OBJECTIVES
from thrifty.simulators.accelerator.accelerator_file import machine_names

ROOT = Path(__file__).parents[2]
TECHNIQUES = techniques.own_names()
DESIGNS = [
    f"thrifty.simulators.accelerator.designs.{file.stem}"
    for file in (ROOT / "src/thrifty/simulators/accelerator/designs").glob("[a-z]*.py")
]
EFFECT = 80
"""Most characters of a technique's effect, so that lists can be read side by side."""


def docstring(module: str) -> str:
    __import__(module)
    return sys.modules[module].__doc__ or ""


def card_of(name: str) -> Card:
    return read_card(docstring(techniques.find(name).__module__))


def faults(text: str) -> list[str]:
    """Describe each deviation of a docstring from the shape of a card."""
    card = read_card(text)
    wrong = [] if card.title and card.paper else ["the first line is not `Name (paper): effect.`"]
    if not re.fullmatch(r"[a-z0-9].*\.", card.effect) or len(card.effect) > EFFECT:
        wrong.append(f"the effect is not a clause of at most {EFFECT} characters: {card.effect!r}")
    if tuple(card.sections) != SECTIONS:
        wrong.append(f"the sections are {list(card.sections)}")
    if card.rest:
        wrong.append(f"text before the first section: {card.rest[:60]!r}")
    for head, section in card.sections.items():
        if head != "Use" and not re.match(r"[A-Z`0-9]", section):
            wrong.append(f"{head} begins with {section[:20]!r}")
        if head not in ("Use", "Paper") and len(re.findall(r"[.!?](?= [A-Z`]|$)", section)) > 2:
            wrong.append(f"{head} has more than two sentences")
    if len(card.sections.get("Use", "").splitlines()) > 4:
        wrong.append("Use has more than four lines")
    if not card.start:
        wrong.append("Start with does not begin with settings in backticks")
    return wrong


@pytest.mark.parametrize("name", TECHNIQUES)
def test_a_technique_card_has_the_one_shape(name: str) -> None:
    assert not faults(docstring(techniques.find(name).__module__))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_card_has_the_one_shape(name: str) -> None:
    assert not faults(docstring(OBJECTIVES[name].__module__))


@pytest.mark.parametrize("module", DESIGNS)
def test_a_design_card_has_the_one_shape(module: str) -> None:
    assert not faults(docstring(module))


@pytest.mark.parametrize("style", FAMILIES)
def test_a_model_card_has_the_one_shape(style: str) -> None:
    assert not faults(inspect.cleandoc(FAMILIES[style].__doc__ or ""))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_shows_its_card_and_sizes(preset: str) -> None:
    shown = thrifty.show(preset, kind="preset")
    assert f'train("{preset}"' in shown.card and f"model.width = {PRESETS[preset].width}" in str(shown)


@pytest.mark.parametrize("name", machine_names())
def test_a_design_shows_its_card_and_settings(name: str) -> None:
    shown = thrifty.show(name, kind="design")
    assert read_card(shown.card).title and all(each["name"] in str(shown) for each in shown.settings)


def test_one_name_of_two_kinds_shows_either_card() -> None:
    assert thrifty.show("a3").name == "attention.a3"
    assert thrifty.show("a3", kind="design").kind == "design"
    assert thrifty.show("mass").kind == "objective", "also the name of a recipe"
    assert thrifty.show("next_token").kind == "objective" and not thrifty.show("next_token").settings
    assert [each["name"] for each in thrifty.show("masked_token").settings] == ["rate", "mask_share", "random_share"]
    with pytest.raises(UsageError, match="there is no preset 'lora'"):
        thrifty.show("lora", kind="preset")
    with pytest.raises(UsageError, match="there is no technique 'lorra'"):
        thrifty.show("lorra")


def test_the_catalog_equals_the_code() -> None:
    """After a change of a card, a setting or a name: `python tools/catalog.py`."""
    assert catalog_text().splitlines() == FILE.read_text(encoding="utf-8").splitlines()


def test_a_technique_outside_the_catalog_is_read_from_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, listed = str(thrifty.show("lamb", results=[ROOT])), thrifty.list(search="lamb")
    empty = {**catalog(), "techniques": {}}
    for module in ("listings", "technique_profiles"):
        monkeypatch.setattr(f"thrifty.interface.{module}.catalog", lambda: empty)
    assert str(thrifty.show("lamb", results=[ROOT])) == shown and thrifty.list(search="lamb") == listed


def test_all_cards_are_one_json_document() -> None:
    cards = {card["name"]: card for card in json.loads(json.dumps(thrifty.list().as_dict(), allow_nan=False))}
    assert list(cards) == techniques.names()
    for name, card in cards.items():
        assert tuple(card["sections"]) == SECTIONS and card["goal"] and card["about"] == card["effect"]
        assert {"evidence", "verdicts", "settings"} <= card.keys(), name
    shown = thrifty.show("lamb").as_dict()
    assert {"about": shown["effect"], **shown} == cards["optimizers.lamb"]
    assert shown["settings"][-1]["default"] is not None and "inf" in json.dumps(shown["settings"])


@pytest.mark.parametrize("kind", ["preset", "objective", "design"])
def test_a_list_as_json_has_the_cards_of_its_kind(kind: Any) -> None:
    cards = thrifty.list(f"{kind}s").as_dict()
    assert list(cards) == [thrifty.show(card["name"], kind=kind).as_dict() for card in cards]


def test_effects_are_unique() -> None:
    effects = [card_of(name).effect for name in TECHNIQUES]
    assert len(set(effects)) == len(effects)


def test_every_group_has_a_heading() -> None:
    for group in {name.partition(".")[0] for name in TECHNIQUES if "." in name}:
        assert re.match(r"[A-Z][^:\n]+: [a-z].*\.", docstring(f"thrifty.techniques.{group}")), group


@pytest.mark.parametrize("name", TECHNIQUES)
def test_the_settings_to_start_with_build_the_technique(name: str) -> None:
    start = card_of(name).start
    full, settings = techniques.split_settings(start)
    assert full == name
    technique_of(f"{name}:{settings}" if settings else name, {})


@pytest.mark.parametrize("name", TECHNIQUES)
def test_no_card_sections_repeat_unknown_settings(name: str) -> None:
    """A setting that a card names in backticks with a value is one of the technique's."""
    known = hints_of(techniques.find(name)).keys()
    card = card_of(name)
    named = re.findall(r"`(\w+)=[^`]*`", " ".join(text for head, text in card.sections.items() if head != "Use"))
    assert set(named) <= set(known), name


@pytest.mark.slow
@pytest.mark.parametrize("name", TECHNIQUES)
def test_the_use_lines_of_a_technique_card_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_use(card_of(name), tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("style", FAMILIES)
def test_the_use_lines_of_a_model_card_run(style: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my.txt").write_text("\n\n".join(f"the cat sat on the mat {i} times" * 9 for i in range(400)))
    run_use(read_card(FAMILIES[style].__doc__), tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("module", DESIGNS)
def test_the_use_lines_of_a_design_card_run(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_use(read_card(docstring(module)), tmp_path, monkeypatch)


def run_use(card: Card, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Execute the "Use" lines in a folder with the files that cards name; a loop of one's own then takes two steps."""
    monkeypatch.chdir(folder)
    lines = card_models.shortened(textwrap.dedent(card.sections["Use"]))
    card_models.write_files(folder, lines)
    names = card_models.Names()
    with one_process_group(monkeypatch) if "init_process_group" in lines else nullcontext():
        exec(compile(lines, card.title, "exec"), {}, names)  # noqa: S102 - lines of our own cards
        if "run" not in names:
            card_models.take_steps(names)
    return names


@contextmanager
def one_process_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the environment variables that torchrun sets for a single process, and end its process group."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    try:
        yield
    finally:
        clear_mesh()
        torch.distributed.destroy_process_group()


def test_every_finding_can_be_read_and_is_of_a_technique() -> None:
    findings = read_findings([ROOT / "results"])
    assert {finding.technique for finding in findings} <= set(TECHNIQUES)
    assert {finding.aspect for finding in findings} <= set(get_args(Aspect))
    assert all(finding.device and finding.model for finding in findings)


def test_evidence_is_printed_below_the_card() -> None:
    results = [ROOT / "results"]
    for name, evidence in evidence_by_technique(results).items():
        printed = str(thrifty.show(name, results=results)) if name in TECHNIQUES else ""
        assert all(line in printed for line in evidence.in_words()), name


def test_exactness_is_the_declared_one() -> None:
    shown = thrifty.show("soap", results=[ROOT / "results"])
    assert any(finding.aspect == "exactness" for finding in shown.evidence.findings)
    assert shown.verdicts()["exactness"] == "different" and "exactness different" in str(shown)


def test_a_card_without_evidence_says_so(tmp_path: Path) -> None:
    printed = str(thrifty.show("lion", results=[tmp_path]))
    assert "not measured yet" in printed and "measured on no machine" in printed


@pytest.mark.parametrize(
    "text",
    [
        "Lion: the sign of a momentum.",
        "Lion (Chen et al. 2023): The sign of a momentum.\n\nPaper       Chen.",
        f"Lion (Chen et al. 2023): {'long ' * 20}.",
    ],
)
def test_a_card_of_another_shape_is_rejected(text: str) -> None:
    assert faults(text)
