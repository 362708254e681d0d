"""Recipe: one immutable object that defines a run.

The sections of a recipe are plain values. `models` builds a model from `ModelSettings`, `data` opens `DataSettings`,
and `training` uses the other sections.
"""

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from torch import nn

from thrifty.core.errors import UsageError, spelled
from thrifty.core.file_names import check_name
from thrifty.core.mesh import Mesh
from thrifty.core.old_names import order_key
from thrifty.core.plain_values import NO_DATA
from thrifty.core.run_relative_settings import StepOrFraction
from thrifty.core.setting_bounds import Natural, Positive, Probability, Rate, SettingBound, check_bounds
from thrifty.core.technique import Technique
from thrifty.core.user_objects import PythonObjects, UserObjects
from thrifty.core.user_sources import is_function_name

Argument = bool | int | float | str | tuple[bool | int | float | str, ...]


@dataclass(frozen=True)
class ModelSettings:
    """Model settings: a preset with changed sizes, a folder in Hugging Face layout, or the user's build function."""

    preset: str = "llama-nano"
    """Name of a preset; empty if a function builds the model."""
    build: str | None = None
    """Name of the function that builds the model, as package.module:function, or the class name of a passed module. The
    name is only a record: loading a file never runs the function."""
    arguments: Mapping[str, Argument] | None = field(default=None, hash=False)
    """Arguments of the function in `build`."""
    weights: str | None = None
    """"given" if training starts from the weights of a passed module. Requires `build`."""
    folder: str = ""
    """Hugging Face model folder, in place of a preset: config.json, and safetensors weights unless `reinitialize`."""
    reinitialize: bool = False
    """True to use only the architecture of `folder`, with random initial weights."""
    depth: int | None = None
    width: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    hidden: int | None = None
    """Inner width of the feed-forward network."""
    tied: bool | None = None
    """True if the output head shares the token embedding's weights."""
    patch: int | None = None
    """Height and width of a patch in pixels, for a vit."""
    pool: str | None = None
    """Input of the output head, for a vit. "class" is the class token. "mean" is the mean of all patches, in a model
    without a class token. "patches" is the mean of all patches, in a model with a class token, such as a trained MAE.
    """
    decoder_depth: int | None = None
    """Number of decoder blocks, for a mae."""
    decoder_width: int | None = None
    text_depth: int | None = None
    """Number of blocks of the caption encoder, for a clip. `depth` is for the image encoder."""
    text_width: int | None = None
    text_heads: int | None = None

    def __post_init__(self) -> None:
        check_bounds(self, "model")
        if self.build is None:
            if self.arguments or self.weights:
                raise UsageError(
                    "model.arguments are set, but no function builds the model", fix="--model package.module:function"
                )
            return
        allowed = ("preset", "build", "arguments", "weights")
        plain = [name for name, value in vars(self).items() if value not in (None, "", False) and name not in allowed]
        if plain:
            raise UsageError(
                f"model.{plain[0]} is set, but the function {self.build!r} builds the model",
                fix=f"leave model.{plain[0]} out, or pass it to the function in model.arguments",
            )
        object.__setattr__(self, "preset", "")


@dataclass(frozen=True)
class AugmentationSettings:
    """Random changes of training images; see `data/images/augmentation.py`. By default, all are off."""

    crop: Natural = 0
    """Pixels of padding around an image before a random crop to its size."""
    flip: bool = False
    """True to flip half of the images horizontally."""
    operations: Annotated[int, SettingBound(least=0, most=32)] = 0
    """Number of random color and geometry operations per image."""
    magnitude: Probability = 0.3
    """Strength of the random operations, from 0 (none) to 1 (strongest)."""
    erase: Probability = 0.0
    """Fraction of images in which a random rectangle is erased."""
    mixup: Rate = 0.0
    """Parameter a of the Beta(a, a) distribution of mixing weights for two images; 0 mixes none."""
    cutmix: Rate = 0.0
    """Parameter a of the Beta(a, a) distribution of the area that remains outside a pasted rectangle; 0 pastes none."""

    def __post_init__(self) -> None:
        check_bounds(self, "data.augment")


@dataclass(frozen=True)
class DataSettings:
    """Training and held-out data: source, columns, tokenizer, batch and size of examples."""

    source: str = ""
    """Training data, without a default: a text file, a table, a folder of text files and tables, the name of a known
    data set, or hub:owner/name. A table is a .csv, .tsv, .jsonl, .json or .parquet file, or a folder of `save_to_disk`.

    sequence_to_sequence also takes pairs: a .tsv file, or a table with the columns "source" and "target". chat_answers
    takes a table of conversations, or a known data set of conversations. Objectives with labels take a table of texts,
    a folder of tables named train and test, or hub:owner/name.

    classification also takes "digits", a known data set of images, or a folder with one subfolder of images per label.
    masked_reconstruction takes these sources, and any folder of images.

    contrastive takes a known data set of images with captions, or a table with image names and captions. It also takes
    a folder with such a table, or with one text file per image.
    """
    sources: Mapping[str, float] = field(default_factory=dict)
    """Several sources of plain text in place of `source`, each with its proportion of examples: {"wiki.txt" = 3, "code"
    = 1}. The tokenizer is trained on the first source unless `tokenizer` is set."""
    separate: bool = False
    """next_token: mask attention between the documents of a row, and start each document at position 0."""
    column: str = ""
    """Text column of a table. The default is "text"; for labelled texts and captions, common names are tried."""
    pair_column: str = ""
    """Column of a pair's second text, for labeled texts. By default, common names are tried."""
    label_column: str = ""
    """Column of labels, for labeled texts. By default, common names are tried."""
    held_out_source: str = ""
    """Source of held-out texts or rows, in place of the fraction `held_out` of `source`."""
    tokenizer: str = ""
    """Path of a tokenizer.json. If empty, a byte-level BPE tokenizer is trained on the training documents."""
    vocabulary: int = 4096
    length: Positive = 256
    """Number of tokens per example."""
    batch: Positive = 32
    """Effective batch: number of examples per step over all ranks and micro-batches."""
    held_out: Annotated[float, SettingBound(above=0, below=1)] = 0.05
    """Fraction of documents or images held out for evaluation, chosen by a hash of the text or image file. Image
    sources with their own test set are not split."""
    near_duplicates: Annotated[float | None, SettingBound(above=0, most=1)] = None
    """Maximum similarity of a text to an earlier document; more similar texts are left out. Documents of a held-out
    file and of earlier sources of a mixture are earlier documents too. Similarity is the fraction of shared 5-word
    sequences. 0.8 is common. None does not search for near duplicates."""
    size: Annotated[int | None, SettingBound(least=1, most=8192)] = None
    """Height and width of images in pixels. Default: the size of the known data set, or for a folder the model's size.
    """
    augment: AugmentationSettings | None = None

    def __post_init__(self) -> None:
        check_bounds(self, "data")


@dataclass(frozen=True)
class ObjectiveSettings:
    """Name of an objective, and its changed settings."""

    name: str = "next_token"
    rate: float | None = None
    """masked_token: fraction of tokens to predict. sequence_to_sequence: fraction removed from plain text. mass:
    fraction in the hidden span. masked_reconstruction: fraction of patches removed."""
    normalize: bool | None = None
    """masked_reconstruction: normalize each target patch by its mean and standard deviation."""
    mask_share: float | None = None
    """masked_token: fraction of the predicted tokens that the mask token replaces."""
    random_share: float | None = None
    """masked_token: fraction of the predicted tokens that a random token replaces."""
    mean_span: float | None = None
    """sequence_to_sequence: mean length in tokens of a span removed from plain text."""
    label_smoothing: float | None = None
    """classification: fraction of each label that is spread evenly over all classes."""
    trained_on: str | None = None
    """chat_answers: learned part of a conversation, "answers" or "everything"."""
    weigh_by: str | None = None
    """chat_answers: unit of equal weight, "tokens" or "conversations"."""
    packed: bool | None = None
    """chat_answers: pack several conversations into a row."""
    template: str | None = None
    """chat_answers: name ("chatml", "alpaca") or file of a chat template. Default: the template of the tokenizer."""

    def __post_init__(self) -> None:
        check_bounds(self, "objective")


@dataclass(frozen=True)
class Budget:
    """Length of training: one of steps, tokens, epochs and seconds."""

    steps: int | None = None
    tokens: float | None = None
    """Amount in the unit of the data: tokens of plain text, images, or examples of a user's own data set."""
    epochs: float | None = None
    seconds: float | None = None
    """Wall-clock time. The number of steps is estimated again during the run."""
    counts: Literal["run", "training"] = "run"
    """Time that counts in `seconds`: the whole run with start-up, evaluations and checkpoints, or training steps."""
    estimate: Annotated[int | None, SettingBound(least=1)] = None
    """First estimate of the number of steps within `seconds`. By default some steps are timed."""

    def __post_init__(self) -> None:
        check_bounds(self, "budget")
        limits = [name for name in ("steps", "tokens", "epochs", "seconds") if getattr(self, name) is not None]
        if len(limits) > 1:
            raise UsageError(f"budget: {' and '.join(limits)} are both set", fix=f"keep one, such as {limits[0]}")
        for name in limits:
            if not (0 < getattr(self, name) < math.inf):
                raise UsageError(f"budget.{name} is {getattr(self, name)}", fix="use a positive, finite amount")

    def in_epochs_of(self, amount: float | None) -> int:
        """Return the budget in epochs as an amount of data, rounded up; `amount` is the amount per epoch. Raise
        UsageError if `amount` is None."""
        assert self.epochs is not None
        if amount is None:
            raise UsageError(
                f"a budget in epochs ({self.epochs:g}) requires data with a known number of examples; streams and "
                "several sources in one run have no epochs",
                fix="--budget 500steps; or --budget 10min",
            )
        return math.ceil(self.epochs * amount)


@dataclass(frozen=True)
class EvaluationSettings:
    """Evaluations on held-out data, the measure that judges them, and early stopping."""

    every: Positive = 100
    """Maximum number of steps between evaluations on held-out data. A run has at least ten evaluations, unless they
    would cost more than 5 % of its work, or patience counts them. A run that would end before patience can stop it
    has more evaluations. The last step is always evaluated."""
    examples: Positive = 64
    at_start: bool = False
    """True to evaluate before the first step too, for runs that start from a trained model."""
    judge: str = "loss"
    """Held-out measure for the best checkpoint, early stopping and comparisons: "loss", or the name of a metric."""
    lower_is_better: bool | None = None
    """True if lower values of `judge` are better. Default: True for the loss, False for a metric."""
    patience: Annotated[int | None, SettingBound(least=1)] = None
    """Number of evaluations without improvement after which a run stops early. None never stops early. If set, each
    best evaluation is followed by a checkpoint."""
    batch: Annotated[int | None, SettingBound(least=1)] = None
    """Number of examples per batch of an evaluation. Default: `data.batch`. It changes the held-out value of a loss
    that compares the examples of a batch, and of one that is a mean over a batch."""

    def __post_init__(self) -> None:
        check_bounds(self, "evaluation")

    @property
    def is_lower_better(self) -> bool:
        return self.judge == "loss" if self.lower_is_better is None else self.lower_is_better


@dataclass(frozen=True)
class CheckpointSettings:
    """Steps that have a checkpoint, and the number of checkpoints to keep."""

    every: Positive = 200
    """Number of steps between checkpoints. The last step always has a checkpoint."""
    keep: Positive = 2
    """Number of newest verified checkpoints to keep, in addition to the best by held-out loss."""
    extra_steps: tuple[StepOrFraction, ...] = ()
    """Steps, or fractions of the run, of additional checkpoints that are never deleted."""
    pause_at: Annotated[int | float | None, SettingBound(above=0)] = None
    """Step, or fraction of the run, after which the run is evaluated, saved and stopped. `thrifty resume` continues."""

    def __post_init__(self) -> None:
        check_bounds(self, "checkpoints")


@dataclass(frozen=True)
class Recipe:
    """Complete definition of a run; see `thrifty.recipe`."""

    name: str = "run"
    about: str = ""
    """One line that describes the run and its expected result."""
    seed: int = 0
    device: str = "auto"
    """"cpu", "cuda", "mps" (Apple chip) or "auto". "auto" is a CUDA GPU if there is one, else the CPU."""
    deterministic: bool = True
    """True to use only deterministic GPU kernels, so that a resumed run equals an uninterrupted run. CPU kernels are
    always deterministic."""
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    budget: Budget = field(default_factory=lambda: Budget(steps=500))
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    checkpoints: CheckpointSettings = field(default_factory=CheckpointSettings)
    mesh: Mesh = field(default_factory=Mesh)
    python: PythonObjects = field(default_factory=PythonObjects)
    techniques: tuple[Technique, ...] = ()
    """Techniques, sorted by stage."""
    objects: UserObjects = field(default_factory=UserObjects, compare=False, repr=False, metadata=NO_DATA)
    """Objects passed from Python. Files store only their names, in `python`."""

    def __post_init__(self) -> None:
        check_name(self.name)
        check_bounds(self, "recipe")
        ordered = sorted(self.techniques, key=lambda technique: (technique.stage, order_key(technique.name)))
        object.__setattr__(self, "techniques", tuple(ordered))
        described = self.objects.described
        passed = {name: text for name, text in vars(described).items() if text}
        if passed:
            passed |= {"sources": described.sources, "metric_sources": described.metric_sources}
        object.__setattr__(self, "python", replace(self.python, **passed))
        if self.python.data:
            object.__setattr__(self, "data", replace(self.data, source="", sources={}))
            if self.python.loss:
                object.__setattr__(self, "objective", ObjectiveSettings())
        if build := self.objects.build:
            weights = "given" if isinstance(self.objects.model, nn.Module) else None
            arguments = self.model.arguments if self.model.build in (None, build) else None
            object.__setattr__(self, "model", ModelSettings(build=build, arguments=arguments, weights=weights))

    def without_objects(self, *names: str) -> "Recipe":
        """Return a recipe without these objects and their names."""
        usual = {name: getattr(UserObjects(), name) for name in names}
        names_left = {name: text for name, text in self.objects.names.items() if name not in names}
        recorded = {name: getattr(PythonObjects(), name) for name in names if name != "model"}
        return replace(
            self,
            objects=replace(self.objects, **usual, names=names_left),
            python=replace(self.python, **recorded),
            model=ModelSettings() if "model" in names else self.model,
        )

    @property
    def _recorded(self) -> dict[str, str]:
        """Names of the recorded objects, by setting."""
        every = {"model": self.model.build, **vars(self.python), "sources": None, "metric_sources": None}
        return {
            name: text if isinstance(text, str) else text[0].rpartition(" ")[2] for name, text in every.items() if text
        }

    @property
    def object_options(self) -> str | None:
        """Command-line options that name the recorded objects, each after a space. None if the command line cannot name
        one of the objects: a module, an instance, `collate` or metrics."""
        return self._options_of(self._recorded)

    def _options_of(self, recorded: Mapping[str, str]) -> str | None:
        are_named = all(map(_is_named, (text for name, text in recorded.items() if name != "model")))
        are_named &= is_function_name(recorded.get("model", "any:model"))
        if ("model" in recorded and self.model.weights) or not are_named or recorded.keys() & {"metrics", "collate"}:
            return None
        return "".join(f" --{name.replace('_', '-')} {text}" for name, text in recorded.items())

    def resume_line(self, folder: object, fork: str = "", budget: str = "") -> str:
        """Return the command or Python call that resumes the run in `folder`, with an extended `budget`."""
        passed = {name: "…" for name in self._recorded}
        if is_function_name(self.model.build) and not self.model.weights:
            passed["model"] = str(self.model.build).rpartition(":")[2]
        if _is_named(self.python.loss):
            passed["loss"] = self.python.loss.rpartition(":")[2]
        options = {name: word for name, word in {"fork": fork, "budget": budget}.items() if word}
        more = [f"{name}={word}" for name, word in passed.items()] + [f'{name}="{w}"' for name, w in options.items()]
        call = f"thrifty.resume({', '.join([repr(str(folder)), *more])})"
        typed = "".join(f" --{name} {word}" for name, word in options.items())
        command = f"thrifty resume {shlex.quote(str(folder))}{self.object_options}{typed}"
        return call if self.object_options is None else spelled(command, call)

    def refuse_missing_objects(self, *names: str) -> None:
        """Raise UsageError if an object that the recipe names was not passed. `names` limits the check."""
        recorded = {name: text for name, text in self._recorded.items() if name in (names or self._recorded)}
        passed = {"model": self.objects.build, **vars(self.objects.described)}
        missing = {name: text for name, text in recorded.items() if not passed[name]}
        if not missing:
            return
        call = f"pass {', '.join(f'{name}=…' for name in recorded)} in Python"
        options = self._options_of(recorded)
        if options is None and not self.model.weights and recorded.keys() <= {"model", "data", "held_out", "loss"}:
            # a class records one of its objects, whose name only the user knows
            names = {name: text if _is_named(text) else f"package.module:my_{name}" for name, text in recorded.items()}
            options = self._options_of(names)
        raise UsageError(
            f"the recipe names Python objects ({', '.join(f'{name}: {text}' for name, text in missing.items())}), "
            "which a file never runs by itself",
            fix=f"if you trust the code, {call if options is None else spelled(f'add{options}', call)}",
        )


def _is_named(text: str) -> bool:
    """Return True for the name of a function or a value, False for the name of a class, which records an instance of
    the class."""
    is_class = text.startswith(("builtins:", "numpy:")) or text.rpartition(":")[2].rpartition(".")[2][:1].isupper()
    return is_function_name(text) and not is_class
