"""Page of `thrifty data look --scores`: examples that a person should review."""

import base64
from dataclasses import asdict, replace

import altair as alt
import torch
from torch import Tensor

from thrifty.core.errors import RefusedError
from thrifty.core.recipe import Recipe
from thrifty.core.score_file import ExampleScores
from thrifty.data.run_data import ExamplePreview, RunData
from thrifty.data.text.text_data import print_to_stderr
from thrifty.experiments.scoring.score_selection import count_labels
from thrifty.experiments.scoring.scoring_methods import METHODS
from thrifty.experiments.scoring.scoring_run import Say
from thrifty.recipes.recipe_toml import recipe_from_data
from thrifty.reporting.chart_renderer import render_svg
from thrifty.reporting.color_theme import LIGHT, chart_look
from thrifty.reporting.example_gallery import ExampleCard, card
from thrifty.reporting.number_format import duration, percent, scaled, significant
from thrifty.reporting.page_templates import template
from thrifty.techniques.data_selection.prune import PrunedExamples
from thrifty.training.data_opening import open_examples

EACH = 24
"""Maximum number of cards per section."""
OF_A_LABEL = 8


def open_scored(scores: ExampleScores, source: str, say: Say = print_to_stderr) -> RunData:
    """Open the data `source`, and check that the scores belong to its examples. Raises RefusedError if the examples
    differ.
    """
    tables = {name: table for name, table in scores.facts.recipe.items() if name != "techniques"}
    recipe: Recipe = recipe_from_data(tables)
    _, data = open_examples(replace(recipe, data=replace(recipe.data, source=source)), say)
    there = data.train.example_index()
    if there.fingerprint != scores.facts.fingerprint:
        raise RefusedError(
            f"the scores belong to {len(scores):,} examples, but {source!r} has {there.count:,} different ones",
            fix=f"review {recipe.data.source}, which was scored; or score this source: thrifty data score",
        )
    return data


def page(scores: ExampleScores, data: RunData, source: str, prune: PrunedExamples | None = None) -> str:
    """Return the page as text. With `prune`, the page also shows the kept examples. The page is deterministic."""
    order = scores.scores.argsort(descending=True, stable=True)
    kept = None if prune is None else _kept(scores, prune)
    facts = scores.facts
    runs = f"{len(scores.runs)} run{'s' if len(scores.runs) > 1 else ''}"
    trained = f" of {facts.steps:,} steps" if facts.steps else ""
    return template("scores.html", "thrifty.experiments").render(
        source=source,
        method=facts.method,
        about=METHODS[facts.method].about if facts.method in METHODS else "",
        summary=f"{len(scores):,} training examples, {runs}{trained}; {scaled(facts.flops, 'FLOP')} and "
        f"{duration(facts.seconds)} for scoring",
        histogram=_histogram(scores.scores, kept),
        suspects=_cards(scores, data, suspicious(scores)[:EACH]),
        labels=_suspects_by_label(scores, data),
        ends=[("highest", _cards(scores, data, order[:EACH])), ("lowest", _cards(scores, data, order.flip(0)[:EACH]))],
        border=_border(scores, data, order, kept),
        kept=None if prune is None else _prune_summary(prune, scores, kept),
        rows=[] if kept is None else count_labels(scores, kept.nonzero().squeeze(1)),
    )


def _kept(scores: ExampleScores, prune: PrunedExamples) -> Tensor:
    """Return a boolean mask (n,) of n examples that is True for kept examples."""
    kept = torch.zeros(len(scores), dtype=torch.bool)
    kept[prune.kept(scores.scores, scores.labels)] = True
    return kept


def _prune_summary(prune: PrunedExamples, scores: ExampleScores, kept: Tensor | None) -> str:
    order = prune.chosen_order(len(scores), scores.labels)
    settings = f"keep {prune.keep}, order {order}, drop_hardest {prune.drop_hardest}"
    words = f"{settings}, min_class_share {prune.min_class_share}"
    return f"{int(kept.sum()) if kept is not None else 0:,} of {len(scores):,} examples are kept: {words}."


def suspicious(scores: ExampleScores) -> Tensor:
    """Return the indices of examples whose predicted label differs from the given label, most suspicious first."""
    if scores.guesses is None or scores.labels is None:
        return torch.empty(0, dtype=torch.int64)
    suspicion = scores.guesses.suspicion(scores.labels)
    order = suspicion.argsort(descending=True, stable=True)
    return order[suspicion[order] > 0]


def _suspects_by_label(scores: ExampleScores, data: RunData) -> list[tuple[str, int, list[ExampleCard]]]:
    """Return, for each label, the most suspicious examples and the number of suspicious examples."""
    numbers, groups = suspicious(scores), []
    if scores.labels is None:
        return []
    own = scores.labels[numbers]
    for label in own.unique().tolist():
        these = numbers[own == label]
        groups.append((scores.label(label), len(these), _cards(scores, data, these[:OF_A_LABEL])))
    return groups


def _border(
    scores: ExampleScores, data: RunData, order: Tensor, kept: Tensor | None
) -> list[tuple[str, list[ExampleCard]]]:
    """Return the examples with the highest and the lowest scores, among kept and among left-out examples."""
    if kept is None:
        return []
    groups = []
    for name, own in (("Kept", order[kept[order]]), ("Left out", order[~kept[order]])):
        for end, numbers in (("highest", own), ("lowest", own.flip(0))):
            if cards := _cards(scores, data, numbers[:OF_A_LABEL]):
                groups.append((f"{name}, with the {end} scores", cards))
    return groups


def _cards(scores: ExampleScores, data: RunData, numbers: Tensor) -> list[ExampleCard]:
    return [_card(scores, each) for each in data.previews(numbers.tolist())]


def _card(scores: ExampleScores, example: ExamplePreview) -> ExampleCard:
    guesses, labels, number = scores.guesses, scores.labels, example.number
    title, remarks = example.label, [f"score {significant(float(scores.scores[number]))}"]
    if guesses is not None and labels is not None:
        predicted, own = int(guesses.predicted[number]), float(guesses.own[number])
        if predicted != int(labels[number]):
            title = f"{example.label}, or {scores.label(predicted)}?"
            believed = percent(float(guesses.confidence[number]))
            remarks.append(f"{scores.label(predicted)}: {believed}, {example.label}: {percent(own)}")
        else:
            remarks.append(f"{example.label}: {percent(own)}")
    return card(asdict(example), title, tuple(remarks))


def _histogram(scores: Tensor, kept: Tensor | None) -> str:
    """Return a histogram of the scores as a data URL."""
    least, most = float(scores.min()), float(scores.max())
    edges = torch.linspace(least, most if most > least else least + 1, 41)
    place = torch.bucketize(scores, edges[1:-1])
    groups = {"all": torch.ones_like(scores, dtype=torch.bool)} if kept is None else {"kept": kept, "left out": ~kept}
    rows = [
        {"from": float(edges[i]), "to": float(edges[i + 1]), "examples": count, "group": name}
        for name, own in groups.items()
        for i, count in enumerate(place[own].bincount(minlength=40).tolist())
    ]
    x = alt.X("from:Q", bin="binned", title="score")
    chart = alt.Chart(alt.Data(values=rows)).mark_bar().encode(x=x, x2="to:Q", y=alt.Y("examples:Q", stack=True))
    if kept is not None:
        colour = alt.Scale(domain=list(groups), range=[LIGHT["train"], LIGHT["held-out"]])
        chart = chart.encode(color=alt.Color("group:N", title=None, scale=colour))
    spec = {**chart.properties(width=820, height=180).to_dict(), "background": LIGHT["surface"], "padding": 12}
    svg = render_svg(spec, chart_look(LIGHT.__getitem__, font="sans-serif"))
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
