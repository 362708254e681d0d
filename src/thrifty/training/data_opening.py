"""Opening of a run's data: the kind of data, the objective, and a user's own data."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import Tensor

from thrifty.core.batches import Batch
from thrifty.core.errors import UsageError
from thrifty.core.objective import Objective
from thrifty.core.recipe import Recipe
from thrifty.data.chat.chat_data import Chats
from thrifty.data.data_kind import DataKind, DataRequest, refuse_other_data
from thrifty.data.images.image_data import Images
from thrifty.data.images.pretrained_normalization import normalized_for
from thrifty.data.pairs.pair_data import ImagesWithCaptions
from thrifty.data.run_data import RunData
from thrifty.data.text.labelled_data import LabelledTexts, has_texts
from thrifty.data.text.text_data import PairsOfTexts, PlainText, print_to_stderr
from thrifty.data.user_data import open_user_data
from thrifty.models import folder_config, own_sizes, patch_side_in, sees_images
from thrifty.objectives import chosen_objective
from thrifty.objectives.embedding_loss import objective_of
from thrifty.objectives.labelled_text import HAS_SCORES
from thrifty.objectives.user_loss import loss_of_output
from thrifty.training.rank_sync import process_group_sync

DATA_KINDS: dict[str, DataKind] = {
    kind.name: kind for kind in (ImagesWithCaptions(), Images(), Chats(), LabelledTexts(), PairsOfTexts(), PlainText())
}
"""Kinds of data by name, the most special first."""


def open_examples(
    recipe: Recipe, say: Callable[[str], None] = print_to_stderr, run: Path | None = None
) -> tuple[Objective, RunData]:
    """Return the objective and the data of a recipe, with all held-out examples. Images are normalized as in `run`, the
    folder of the run with the weights."""
    recipe.refuse_missing_objects("data", "held_out", "loss", "collate", "metrics")
    settings, objective = recipe.data, chosen_objective(recipe.objective)
    kinds = [DATA_KINDS[name] for name in objective.learns_from]
    for name in ("near_duplicates", "sources", "separate"):
        if getattr(settings, name) not in (None, False, {}) and name not in kinds[0].own_settings:
            raise UsageError(
                f"data.{name} is only for plain text, but {recipe.objective.name} learns from other data",
                fix=f"leave data.{name} out",
            )
    is_passed = recipe.objects.data is not None
    if not (settings.source.strip() or settings.sources or is_passed):  # for example, a shell variable that is not set
        raise UsageError(
            f"the recipe {recipe.name!r} has no data to train on",
            fix="--data my.txt, which may be a file, a folder or a dataset name, such as --data python-stdlib",
        )
    if not is_passed:
        fitting = [each for each in kinds if each.is_visual == sees_images(recipe.model)]
        refuse_other_data(recipe, fitting or kinds, DATA_KINDS.values())
    kind = kinds[-1] if is_passed else next((each for each in kinds if each.holds(settings)), kinds[-1])
    if settings.sources or settings.separate:  # settings of plain text
        kind = kinds[0]
    for name in ("size", "augment"):
        if getattr(settings, name) is not None and name not in kind.own_settings:
            from_text = f"{recipe.objective.name} learns from text"
            why = f"'{settings.source}' contains none" if objective.sees_images else from_text
            raise UsageError(f"data.{name} is only for images, but {why}", fix=f"leave data.{name} out")
    for name in ("pair_column", "label_column", "held_out_source"):
        if getattr(settings, name) and name not in kind.own_settings:
            kinds_of_text = "texts" if name == "held_out_source" else "labelled texts"
            raise UsageError(
                f"data.{name} is only for {kinds_of_text}, but {recipe.objective.name} learns from other data",
                fix=f"leave data.{name} out; or --set objective.name=classification; or objective.name=regression",
            )
    if kind.name == "labelled_text" and objective.label_form != "number" and not HAS_SCORES:
        say("accuracy is the only metric: F1 needs scikit-learn (pip install 'thrifty[metrics]')")
    side = own_sizes(recipe.model)[0] if kind.is_visual else None
    patch = partial(patch_side_in, recipe)
    normalized_as = partial(normalized_for, recipe.model, run)
    config = partial(folder_config, recipe.model)
    return kind.open(DataRequest(recipe, objective, side, patch, normalized_as, say, config))


def open_first_on_rank_0(
    recipe: Recipe, say: Callable[[str], None], run: Path | None = None
) -> tuple[Objective, RunData]:
    """Open the data like `open_examples` on rank 0, then on the remaining ranks. Rank 0 prepares the data and reports
    missing parts."""
    objects = recipe.objects

    def opened_by(say: Callable[[str], None]) -> tuple[Objective, RunData]:
        is_labelled = "labelled_text" in chosen_objective(recipe.objective).learns_from and objects.loss is None
        if objects.data is None or (is_labelled and has_texts(objects.data)):
            if objects.metrics and not objects.loss:
                raise UsageError(
                    f"metrics= was passed, but the objective {recipe.objective.name} has its own metrics",
                    fix="leave metrics out; or pass loss=, a function of (model, batch)",
                )
            objective, data = open_examples(recipe, say, run)
            if objects.loss:
                objective = objective_of(objects.loss, _fields, objects.metrics, data.example_unit)
            return objective, data
        settings = recipe.data
        judged = recipe.evaluation.examples
        data = open_user_data(objects.data, objects.held_out, settings.batch, recipe.seed, objects.collate, judged)
        return objective_of(objects.loss or loss_of_output, data.assembled, objects.metrics), data

    opened: list[tuple[Objective, RunData]] = []
    process_group_sync().run_first(lambda: opened.append(opened_by(say)))
    return opened[0] if opened else opened_by(lambda text: None)


def _fields(batch: Batch) -> dict[str, Tensor]:
    return dict(batch.fields)
