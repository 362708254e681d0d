"""`recipe`: build a recipe from the user's own model, data, loss and metrics."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

from torch import nn

from thrifty.core.claims import Claim
from thrifty.core.errors import RefusedError, UsageError, did_you_mean, for_reader, spelled
from thrifty.core.peer_names import peer_option
from thrifty.core.plain_values import read_budget
from thrifty.core.recipe import Argument, Budget, ModelSettings, ObjectiveSettings, Recipe
from thrifty.core.technique import Technique
from thrifty.core.user_objects import BuildModel, UserObjects
from thrifty.core.user_sources import is_dataset_name, is_function_name
from thrifty.data.catalogue import folder_of_model
from thrifty.data.chat.conversation_sources import holds_conversations
from thrifty.data.data_loading import dataset_of
from thrifty.data.text.labelled_data import has_texts
from thrifty.experiments import studies
from thrifty.interface.own_loop import technique_of
from thrifty.models import PROBLEM_TYPES, folder_config, label_objective
from thrifty.models.model_resolution import own_shape
from thrifty.objectives import chosen_objective
from thrifty.objectives.user_metrics import DatasetMetric, ModelMetric
from thrifty.recipes import RECIPES, load_recipe
from thrifty.recipes.recipe_layers import RecipeLayers, fine_tuning_rate
from thrifty.reporting.run_record import find_run
from thrifty.techniques import find
from thrifty.techniques.optimizers.adamw import AdamW
from thrifty.training.trained_model import stored_recipe

Function = Callable[[nn.Module, Any], Any]
Metric = Function | DatasetMetric | ModelMetric


class RecipeArguments(TypedDict, total=False):
    """Arguments of `thrifty.recipe`, which all functions that accept a recipe also accept."""

    model: nn.Module | BuildModel | str | Path | None
    model_arguments: Mapping[str, Argument] | None
    data: Any
    held_out: Any
    loss: Function | str | None
    metrics: Mapping[str, Metric] | None
    techniques: Sequence[str | Technique | type[Technique]]
    budget: int | str | None
    batch: int | None
    collate: Callable[[list[Any]], Any] | None
    name: str | None
    seed: int | None
    device: str | None
    settings: Mapping[str, Any] | None


def recipe_from(call: str, base: Recipe | str | Path | None, arguments: RecipeArguments) -> Recipe:
    """Return the recipe of a call of `thrifty.<call>` with a base recipe and the arguments of `recipe`. Raises
    UsageError for any other argument."""
    known = RecipeArguments.__annotations__
    if unknown := next((name for name in arguments if name not in known), ""):
        raise UsageError(
            f"thrifty.{call} has no argument {unknown!r}",
            for_reader(peer_option(unknown)) or did_you_mean(unknown, known),
        )
    return recipe(recipe=base, **arguments)


def recipe(
    model: nn.Module | BuildModel | str | Path | None = None,
    data: Any = None,
    *,
    model_arguments: Mapping[str, Argument] | None = None,
    held_out: Any = None,
    loss: Function | str | None = None,
    metrics: Mapping[str, Metric] | None = None,
    techniques: Sequence[str | Technique | type[Technique]] = (),
    budget: int | str | None = None,
    batch: int | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    name: str | None = None,
    seed: int | None = None,
    device: str | None = None,
    settings: Mapping[str, Any] | None = None,
    recipe: Recipe | str | Path | None = None,
) -> Recipe:
    """Return a recipe: the description of a run that `train`, `check`, `explain`, `compare` and `plan` accept.

    Args:
        model: Module whose weights are the initial values, function that builds a module, preset, or Hugging Face
            folder. The function is called with `model_arguments`.
        data, held_out: A dataset object, a path or name of a dataset, or sampling weights by source, as in {"wiki.txt":
            3, "code": 1}. Objects: map-style or iterable dataset, `datasets.Dataset`, DataLoader (its workers read it),
            list, array, or tuple of arrays.
        loss: Function `loss(model, batch)`, or the name of an objective. The function returns one loss per example, or
            (losses, weights), or a mean. The default for conversations is "chat_answers".
        metrics: By name: a function with the same signature and return values as a loss, a `DatasetMetric` or a
            `ModelMetric`.
        techniques: Techniques as objects, classes or names. The default optimizer is AdamW with linear decay.
            Its learning rate is 1e-3; 5e-5 for a pretrained model, and 5e-4 for adapters of one.
        budget: "20 steps", "1e7 tokens", "3 epochs", "90s", "10min", "2h" or a number of steps.
        batch: Effective batch: number of examples per step.
        settings: Other values by dotted path in the recipe, as in {"evaluation.examples": 1000}.
        recipe: Recipe, its name (`thrifty.list("recipes")`) or TOML file. It supplies all values that are not passed.
            The default is `llama-nano` for 500 steps; data have no default.

    Model, data, held-out data and loss may also be import names, "package.module:name". A recipe contains the objects,
    but its TOML file contains only their names.

    Raises UsageError if arguments do not fit together.

    Example::

        mine = thrifty.recipe(model=build_model, data=train_set, held_out=test_set, loss=loss, budget="10 steps")
        run = thrifty.train(recipe=mine)
    """
    base, batch_size = _given(recipe), batch
    is_for_new_model = isinstance(recipe, str) and recipe in RECIPES and not base.model.folder
    if isinstance(techniques, str):
        raise UsageError(f"techniques is {techniques!r}, not a list", fix=f'techniques=["{techniques}"]')
    changes = (
        model,
        model_arguments,
        data,
        held_out,
        loss,
        metrics,
        budget,
        batch,
        collate,
        name,
        seed,
        device,
        settings,
    )
    if recipe is not None and not techniques and all(change is None for change in changes):
        return base
    given = {"model": model, "data": data, "held_out": held_out, "loss": loss}
    typed = {key: value for key, value in given.items() if names_object(value, key in ("data", "held_out"))}
    own = UserObjects.from_arguments(**typed)
    model, data, held_out, loss = (getattr(own, key) if key in typed else value for key, value in given.items())
    passed: dict[str, Any] = {"metrics": named_metrics(metrics) or None, "collate": collate}
    if isinstance(model, str | Path):
        base = replace(base.without_objects("model"), model=_model_settings(model), about="")
    elif model is not None:
        passed |= {"model": model}
        build = UserObjects(model, names=typed).build
        base = replace(base, about="" if recipe is not None and base.model.build != build else base.about)
    has_path = isinstance(held_out, str | Path)
    is_own = bool(base.python.data) if data is None else not (isinstance(data, str | Path) or is_mixture(data))
    if held_out is not None and has_path == is_own:
        raise UsageError(
            f"held_out is {'a path' if has_path else 'a dataset'}, but data is {'a dataset' if is_own else 'a path'}",
            fix="pass both as datasets, or both as paths",
        )
    if is_mixture(data):
        sources = {str(name): float(weight) for name, weight in data.items()}
        base = replace(base.without_objects("data", "held_out"), data=replace(base.data, sources=sources))
    elif isinstance(data, str | Path):
        source = replace(base.data, source=_absolute(data), sources={})
        base = replace(base.without_objects("data", "held_out"), data=source)
        if recipe is None:
            base = _fitting(base, loss is None)
    elif data is not None:
        if held_out is None:
            split = "train, held_out = torch.utils.data.random_split(data, [0.9, 0.1])"
            raise UsageError(
                "your own data require held-out data for evaluation",
                fix=spelled(
                    "--held-out package.module:name, of a second dataset", f"{split}; pass data=train, held_out=…"
                ),
            )
        batch_size = dataset_of(data)[2] if batch is None else batch
        passed |= {"data": data}
        base = _fitting(base, is_free=False) if recipe is None and isinstance(loss, str) else base
    if has_path or not (is_own or data is None):
        base = replace(base, data=replace(base.data, held_out_source=_absolute(held_out) if has_path else ""))  # type: ignore[arg-type]
    elif held_out is not None:
        passed |= {"held_out": held_out}
    if isinstance(loss, str):
        base = replace(base.without_objects("loss"), objective=ObjectiveSettings(loss))
        if "data" in passed:
            _check_objective_reads(passed["data"], base.objective)
    else:
        passed["loss"] = loss
    if recipe is None and base.objective.name in PROBLEM_TYPES:  # F1 of few texts is too noisy
        base = replace(base, evaluation=replace(base.evaluation, examples=1_000))
    if batch_size is not None:
        base = replace(base, data=replace(base.data, batch=batch_size))
    passed = {key: value for key, value in passed.items() if value is not None}
    names = {key: text for key, text in base.objects.names.items() if key not in passed} | typed
    objects = replace(base.objects, **passed, names=names)
    chosen = tuple(technique_of(each, {}) for each in techniques) or base.techniques
    if is_for_new_model and not techniques and base.model.folder:  # as RecipeLayers.lower_rate
        rate = fine_tuning_rate(each.name for each in chosen)
        chosen = tuple(replace(each, lr=rate) if isinstance(each, AdamW) else each for each in chosen)
    named = {"name": name, "seed": seed, "device": None if device is None else str(device)}
    base = replace(
        base,
        techniques=_with_optimizer(chosen, base.model, model),
        objects=objects,
        **{key: value for key, value in named.items() if value is not None},  # type: ignore[arg-type]
    )
    if model_arguments:
        base = replace(base, model=replace(base.model, arguments={**(base.model.arguments or {}), **model_arguments}))
    if budget is not None:
        base = replace(base, budget=_budget(budget))
    if not settings:
        return base
    if not isinstance(settings, Mapping) or not all(isinstance(path, str) for path in settings):
        raise UsageError(
            f"settings is {settings!r:.60}, not a dict of values by dotted path",
            fix='settings={"evaluation.examples": 100}',
        )
    layers = RecipeLayers.above("the recipe", base)
    for path, value in settings.items():
        layers.assign("settings", path, value)
    return layers.recipe()


def layers_of(recipe: str | Path) -> RecipeLayers:
    """Return a recipe, loaded by name or file, as the lowest layer of settings."""
    return load_recipe(str(recipe), f"recipe {recipe}", studies.names())


def stored_layers(run: str | Path) -> RecipeLayers:
    """Return the stored recipe of a run as the lowest layer of settings."""
    path = find_run(run)
    return RecipeLayers().override(f"run {path.name}", stored_recipe(path))


def names_object(value: Any, is_data: bool = False) -> bool:
    """Return True if `value` is the import name of a user's object. An existing path is not a name."""
    is_name = is_dataset_name if is_data else is_function_name
    return isinstance(value, str) and is_name(value) and not Path(value).exists()


def is_mixture(data: Any) -> bool:
    """Return True if `data` is a dict of sampling weights by source."""
    return isinstance(data, Mapping) and bool(data) and all(isinstance(each, int | float) for each in data.values())


def _absolute(source: str | Path) -> str:
    """Return the absolute path of an existing source, as on the command line; names of datasets stay."""
    return str(Path(source).resolve()) if str(source) and Path(source).exists() else str(source)


def _check_objective_reads(data: Any, objective: ObjectiveSettings) -> None:
    """Raise UsageError if an objective by name cannot read a user's own dataset. Some read labelled texts."""
    reads_labels = "labelled_text" in chosen_objective(objective).learns_from
    if not (reads_labels and has_texts(data)):
        raise UsageError(
            f"the objective {objective.name!r} does not read your own dataset"
            + (", because its examples have no text" if reads_labels else ""),
            fix="pass loss=, a function of (model, batch); or data=, a file, a folder or the name of a dataset",
        )


def _given(recipe: Recipe | str | Path | None) -> Recipe:
    """Return the recipe from an object, a name or a file. Raise UsageError for a model or any other value."""
    if not isinstance(recipe, Recipe | str | Path | None):
        raise UsageError(
            f"the recipe is a {type(recipe).__name__!r}, not a thrifty.Recipe, name or file",
            fix="pass objects by name: model=…, data=…, held_out=…, loss=…",
        )
    return layers_of(recipe).recipe() if isinstance(recipe, str | Path) else recipe or Recipe()


def _fitting(recipe: Recipe, is_free: bool) -> Recipe:
    """Return the recipe with the tokenizer and context of its model folder. If the objective is not set, use the
    default objective of the data.
    """
    tokenizer = Path(recipe.model.folder, "tokenizer.json")
    if recipe.model.folder and tokenizer.is_file():
        recipe = replace(recipe, data=replace(recipe.data, tokenizer=str(tokenizer)))
        with suppress(RefusedError):  # an architecture that only transformers implements
            length = min(recipe.data.length, own_shape(recipe.model).length)
            recipe = replace(recipe, data=replace(recipe.data, length=length))
    if not is_free:
        return recipe
    is_chat = holds_conversations(recipe.data.source)
    name = "chat_answers" if is_chat else label_objective(folder_config(recipe.model))
    return replace(recipe, objective=ObjectiveSettings(name)) if name else recipe


def _model_settings(model: str | Path) -> ModelSettings:
    if Path(model).is_dir():
        return ModelSettings(folder=str(Path(model).resolve()))
    if fetched := folder_of_model(str(model)):
        return ModelSettings(folder=str(fetched))
    if str(model) in RECIPES:
        fix = spelled(f"thrifty train {model}", f'recipe="{model}"')
        raise UsageError(f"'{model}' is a recipe, not a model", fix)
    return ModelSettings(str(model))


def named_metrics(metrics: Any) -> dict[str, Metric]:
    """Return metrics by name. Raise UsageError for metrics without names."""
    if not isinstance(metrics, Mapping | None):
        each = metrics[0] if isinstance(metrics, list | tuple) and metrics else metrics
        name = getattr(each, "__name__", "score")
        raise UsageError(f"metrics is a {type(metrics).__name__}, without names", fix=f'metrics={{"{name}": …}}')
    return dict(metrics or {})


def _with_optimizer(chosen: tuple[Technique, ...], model: ModelSettings, module: Any) -> tuple[Technique, ...]:
    claims = {claim for each in chosen for claim in each.claims}
    defaults = {Claim.OPTIMIZER: "optimizers.adamw", Claim.SCHEDULE: "schedules.linear"}
    if Claim.OPTIMIZER in claims:
        return chosen
    added = [find(name)() for claim, name in defaults.items() if claim not in claims]
    # `from_pretrained` names the weights in the config, and sets evaluation mode; a new model is in training mode
    is_given = isinstance(module, nn.Module) and not module.training
    weights = getattr(getattr(module, "config", None), "_name_or_path", "") if is_given else ""
    if weights or (model.folder and not model.reinitialize):
        rate = fine_tuning_rate(each.name for each in chosen)
        added = [AdamW(lr=rate) if isinstance(each, AdamW) else each for each in added]
    return (*chosen, *added)


def _budget(budget: int | str) -> Budget:
    return Budget(steps=budget) if isinstance(budget, int) else Budget(**read_budget(str(budget), "the budget"))  # type: ignore[arg-type]
