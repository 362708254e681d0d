"""`thrifty data score` and `prune`: how hard each training example is, and which to train on; a page of them."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from thrifty.cli.recipe_options import build_recipe, read_moment, recipe_options, together
from thrifty.cli.verb_output import print_json, progress
from thrifty.core.errors import UsageError

if TYPE_CHECKING:
    from thrifty.core.score_file import ExampleScores
    from thrifty.techniques.data_selection.prune import PrunedExamples

SETTINGS = {"keep_fraction": "keep"}
"""What options are called as settings of `data_selection.prune`."""


choice_options = together(
    click.option("--keep-fraction", type=float, help="Share of the training examples that is kept.  [default: 0.5]"),
    click.option("--order", help="hard, easy, auto (by abundance) or random.  [default: hard]"),
    click.option("--drop-hardest", type=float, help="Share, the very hardest, left out first.  [default: 0]"),
    click.option("--min-class-share", type=float, help="Share of an equal part kept of each label.  [default: 0.5]"),
)
"""Options that select examples; None where one is not given."""


@click.command()
@recipe_options
@click.option("--method", "by", default="el2n", show_default=True, metavar="METHOD", help="See below.")
@click.option("--runs", type=int, help="Runs to average over, of one seed each.  [default: 5]")
@click.option("--steps", metavar="STEPS|SHARE", help="How long each is trained: 0, 100, or 0.2 of the recipe.")
@click.option("--embed-with", default="", metavar="FOLDER", help="prototype: a run or model folder, in place of runs.")
@click.option("--clusters", type=int, help="prototype: how many k-means looks for.  [default: one for each label]")
@click.option("--out", type=click.Path(path_type=Path), help="The file to write.  [default: NAME-METHOD.safetensors]")
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def score(
    by: str,
    runs: int | None,
    steps: str | None,
    embed_with: str,
    clusters: int | None,
    out: Path | None,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Score every training example of RECIPE by how hard it is: a file of scores for pruning and looking.

    \b
    el2n        norm of the error, softmax minus label
    grand       norm of the example's own gradient over all parameters
    forgetting  how often it was told right and then wrong again
    loss        its loss
    margin      by how much another label is likelier than its own
    prototype   cosine distance of its embedding to the own k-means centre
    random, input_norm   controls

    Killed or stopped, the same command runs what is missing.
    """
    from thrifty.experiments.scoring.example_scoring import ScoringSettings
    from thrifty.experiments.scoring.example_scoring import score as score_all

    settings: dict[str, Any] = {"by": by, "runs": runs, "embed_with": embed_with, "clusters": clusters}
    if steps is not None:
        settings["steps"] = read_moment("--steps", steps, "give steps, such as 100, or a share: 0.2")
    scoring = ScoringSettings(**settings)
    recipe = build_recipe(**options).recipe()
    target = out or Path(f"{recipe.name}-{by}.safetensors")
    scores, sha256 = score_all(recipe, scoring, target, say=progress(quiet))
    facts = scores.facts
    if as_json:
        numbers = {"examples": len(scores), "runs": len(scores.runs), "steps": facts.steps, "seeds": facts.seeds}
        cost = {"flops": facts.flops, "seconds": facts.seconds}
        print_json({"file": str(target), "sha256": sha256, "method": by, **numbers, **cost})
    elif not quiet:
        click.echo("\n".join(_scored(scores, target, sha256, recipe.data.source)))


@click.command()
@click.argument("scores", type=click.Path(path_type=Path))
@choice_options
@click.option("--recipe", help="Name or TOML file of the recipe to prune.  [default: the one that was scored by]")
@click.option("--write", type=click.Path(path_type=Path), help="Write the recipe with the choice as this TOML file.")
@click.option("--json", "as_json", is_flag=True, help="Print the counts and the settings as JSON.")
def prune(scores: Path, recipe: str | None, write: Path | None, as_json: bool, **choice: Any) -> None:
    """Say what a choice by the file SCORES keeps of each label, and how a recipe names it.

    Nothing is deleted: a recipe with the choice trains on what is kept.
    """
    import tomli_w

    from thrifty.core.score_file import file_hash, read_scores
    from thrifty.experiments.scoring import score_selection

    if recipe is not None and write is None:
        raise UsageError("--recipe is the recipe that --write writes", fix="--write pruned.toml")
    chosen = _chosen(scores, file_hash(scores), choice)
    table = read_scores(scores)
    kept = chosen.kept(table.scores, table.labels)
    rows, changed = score_selection.count_labels(table, kept), score_selection.changed_settings(chosen)
    if write is not None:
        _write(write, recipe, table, chosen)
    if as_json:
        told = {"examples": len(table), "kept": len(kept), "labels": [row._asdict() for row in rows]}
        print_json({**told, "technique": chosen.name, "settings": changed})
        return
    lines = [f"{'':24}{'all':>10}{'kept':>10}{'left out':>10}"]
    for row in [*rows, score_selection.LabelCount("all", len(table), len(kept))] if table.labels is not None else rows:
        lines.append(f"{row.label or 'examples':<24}{row.there:>10,}{row.kept:>10,}{row.there - row.kept:>10,}")
    if chosen.drop_hardest:
        lines.append(f"of these left out as the very hardest: {round(chosen.drop_hardest * len(table)):,}")
    lines += ["", "on the command line:", f"  --with {score_selection.format_option(chosen)}", "", "in a recipe:"]
    tables = {"techniques": {"data_selection": {"prune": changed}}}
    lines += [f"  {line}" for line in tomli_w.dumps(tables).splitlines()]
    if write is not None:
        lines += ["", f"written: thrifty train {write}"]
    click.echo("\n".join(lines))


def print_suspicious_examples(source: str, scores: Path, out: Path | None, as_json: bool, **choice: Any) -> None:
    """A page of the examples that a person should look at, for `thrifty data look --scores`."""
    from thrifty.core.score_file import file_hash, read_scores
    from thrifty.experiments.scoring.review_page import open_scored, page, suspicious

    table = read_scores(scores)
    is_chosen = any(value is not None for value in choice.values())
    chosen = _chosen(scores, file_hash(scores), choice) if is_chosen else None
    data = open_scored(table, source, progress())
    target = out or scores.with_suffix(".html")
    if target.exists():
        raise UsageError(f"{target} exists already", fix="give another --out, or remove it")
    target.write_text(page(table, data, source, chosen), encoding="utf-8")
    doubted = suspicious(table).tolist()
    if as_json:
        print_json({"page": str(target), "examples": len(table), "doubted": len(doubted), "first": doubted[:100]})
        return
    click.echo(f"{target}: {len(table):,} examples by {table.facts.method}")
    if table.guesses is not None:
        click.echo(f"the runs believe another label of {len(doubted):,} of them; the surest come first on the page")


def _chosen(path: Path, sha256: str, choice: dict[str, Any]) -> "PrunedExamples":
    from thrifty.core.plain_values import build
    from thrifty.techniques.data_selection.prune import PrunedExamples

    overrides = {SETTINGS.get(name, name): value for name, value in choice.items() if value is not None}
    return build(PrunedExamples, {"scores": str(path.resolve()), "sha256": sha256, **overrides}, "prune")


def _write(target: Path, recipe: str | None, table: "ExampleScores", chosen: "PrunedExamples") -> None:
    from thrifty.experiments import studies
    from thrifty.experiments.scoring.score_selection import changed_settings
    from thrifty.recipes import load_recipe
    from thrifty.recipes.recipe_layers import RecipeLayers
    from thrifty.recipes.recipe_toml import write_recipe

    if target.exists():
        raise UsageError(f"{target} exists already", fix="give another --write")
    scored = RecipeLayers().override("recipe", table.facts.recipe)
    layers = scored if recipe is None else load_recipe(recipe, "recipe", studies.names())
    name = f"{layers.values().get('name', 'run')}-pruned"
    layers.override("prune", {"name": name, "techniques": {"data_selection": {"prune": changed_settings(chosen)}}})
    target.write_text(write_recipe(layers.recipe()), encoding="utf-8")


def _scored(scores: "ExampleScores", target: Path, sha256: str, source: str) -> list[str]:
    from thrifty.reporting.number_format import duration, scaled, significant

    facts = scores.facts
    runs = f"{len(scores.runs)} run{'s' if len(scores.runs) > 1 else ''}"
    trained = f" of {facts.steps:,} steps" if facts.steps else ""
    quantiles = [significant(float(scores.scores.double().quantile(at))) for at in (0, 0.25, 0.5, 0.75, 1)]
    return [
        f"{len(scores):,} examples by {facts.method}, {runs}{trained}; higher is harder",
        f"cost       {scaled(facts.flops, 'FLOP')}, {duration(facts.seconds)}",
        f"scores     least {quantiles[0]}, quarters {', '.join(quantiles[1:4])}, most {quantiles[4]}",
        f"kept in    {target}",
        f"sha256     {sha256}",
        f"look       thrifty data look {source} --scores {target}",
        f"prune      thrifty data prune {target} --keep-fraction 0.5",
    ]
