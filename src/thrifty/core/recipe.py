"""A recipe: one value that says everything about a run.

The sections below are plain values. What they mean is known where they are used: `models` builds from `ModelSettings`,
`data` opens `DataSettings`, `training` obeys the rest.
"""

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

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
    """A preset by name, with any of its sizes changed; a folder in Hugging Face layout; or a function of the user's own
    that builds the model."""

    preset: str = "llama-nano"
    """Empty where a function builds the model."""
    build: str | None = None
    """A function, as package.module:function, or the class of a module that was passed: a record, which no file runs by
    itself."""
    arguments: Mapping[str, Argument] | None = field(default=None, hash=False)
    """With `build`: what the function is called with."""
    weights: str | None = None
    """With `build`: "given" where training starts from the weights of a module that was passed."""
    folder: str = ""
    """A Hugging Face model folder (config.json, and safetensors weights unless `fresh`); takes the preset's place."""
    reinitialize: bool = False
    """With `folder`: take the architecture only and start from random weights."""
    depth: int | None = None
    width: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    hidden: int | None = None
    """Inner width of the feed-forward network."""
    tied: bool | None = None
    """Whether the head shares the token embedding's weights."""
    patch: int | None = None
    """Of a vit: height and width of a patch in pixels."""
    pool: str | None = None
    """Of a vit: what the head is given, "class" for the class token, "mean" for the mean of all patches of a model
    without one, "patches" for that mean beside a class token, as a trained MAE has one."""
    decoder_depth: int | None = None
    """Of a mae: blocks of the decoder."""
    decoder_width: int | None = None
    text_depth: int | None = None
    """Of a clip: blocks of the tower that reads captions; the sizes above are those of the tower for images."""
    text_width: int | None = None
    text_heads: int | None = None

    def __post_init__(self) -> None:
        check_bounds(self, "model")
        if self.build is None:
            if self.arguments or self.weights:
                raise UsageError(
                    "model.arguments are set, and no function builds the model", fix="--model package.module:function"
                )
            return
        allowed = ("preset", "build", "arguments", "weights")
        plain = [name for name, value in vars(self).items() if value not in (None, "", False) and name not in allowed]
        if plain:
            raise UsageError(
                f"model.{plain[0]} is set, and the function {self.build!r} builds the model",
                fix=f"leave model.{plain[0]} out; what the function takes goes into model.arguments",
            )
        object.__setattr__(self, "preset", "")


@dataclass(frozen=True)
class AugmentationSettings:
    """How training images are changed, each time in another way; see `data/images/augmentation.py`. All off unless
    set."""

    crop: Natural = 0
    """Pixels of padding around an image, out of which a piece of the old size is cut at random."""
    flip: bool = False
    """Whether half of the images are mirrored, left for right."""
    operations: Annotated[int, SettingBound(least=0, most=32)] = 0
    """How many of the operations on colours and geometry are made, one after the other."""
    magnitude: Probability = 0.3
    """How strong they are, from nothing to the strongest."""
    erase: Probability = 0.0
    """The share of images in which a rectangle is erased."""
    mixup: Rate = 0.0
    """Shape a of the Beta(a, a) distribution by which two images are mixed; 0 mixes none."""
    cutmix: Rate = 0.0
    """The same for a rectangle of another image in the place of the image's own."""

    def __post_init__(self) -> None:
        check_bounds(self, "data.augment")


@dataclass(frozen=True)
class DataSettings:
    source: str = "python-stdlib"
    """A file (.txt, .jsonl, .parquet), a folder of text files, the name of a known set, or hub:owner/name; for
    sequence_to_sequence also pairs: a .tsv, or a .jsonl of rows with a "source" and a "target"; for chat_answers a
    .jsonl or .json of conversations, or a known set of them; for objectives with labels a .csv, .tsv, .jsonl or
    .parquet of texts, a folder of such files called train and test, or hub:owner/name; for classification also
    "digits", a known set of images, or a folder with a folder of images for each label; for masked_reconstruction any
    of these and any folder of images; for contrastive a known set of images with captions, a .jsonl, .tsv or .parquet
    that names them, or a folder with such a table, or with a text beside each image."""
    sources: Mapping[str, float] = field(default_factory=dict)
    """Several sources of plain text in the place of `source`, each with its share of the examples:
    {"wiki.txt" = 3, "code" = 1}. The tokenizer is trained on the first unless `tokenizer` names one."""
    separate: bool = False
    """next_token: mask attention between documents that share a row, and begin each at position 0."""
    column: str = "text"
    """Where a row of .jsonl or .parquet keeps its text; of images with captions, where their captions are, which are
    otherwise looked for under the usual names."""
    pair_column: str = ""
    """The column of the second text of a pair, for labelled texts; found by the usual names unless set."""
    label_column: str = ""
    """The column of labels, for labelled texts; found by the usual names unless set."""
    held_out_source: str = ""
    """A file of held-out rows, for labelled texts, in place of a share of `source`."""
    tokenizer: str = ""
    """A tokenizer.json to use; empty trains a byte-level BPE on the training documents."""
    vocabulary: int = 4096
    length: Positive = 256
    """Tokens per example."""
    batch: Positive = 32
    """Effective batch: examples per step over all ranks and micro-batches."""
    held_out: Annotated[float, SettingBound(above=0, below=1)] = 0.05
    """Fraction of documents kept for evaluation, chosen by the hash of their text; of images by that of their file,
    where the source does not say itself which to test on."""
    near_duplicates: Annotated[float | None, SettingBound(above=0, most=1)] = None
    """Of text: how alike a document may be to one before it, as a share of their runs of five words, before it is left
    out; 0.8 is usual. None are looked for unless it is given."""
    size: Annotated[int | None, SettingBound(least=1, most=8192)] = None
    """Height and width of images in pixels; unless given those of a known set, and for a folder those of the model."""
    augment: AugmentationSettings | None = None

    def __post_init__(self) -> None:
        check_bounds(self, "data")


@dataclass(frozen=True)
class ObjectiveSettings:
    """An objective by name, with any of the settings that it has changed."""

    name: str = "next_token"
    rate: float | None = None
    """masked_token: the share of tokens that is predicted; sequence_to_sequence: the share cut out of plain text;
    mass: the share that the hidden span is; masked_reconstruction: the share of patches that is removed."""
    normalize: bool | None = None
    """masked_reconstruction: whether each patch is given back less its mean, over its deviation."""
    mask_share: float | None = None
    """masked_token: of the predicted tokens, the share that is hidden behind the mask."""
    random_share: float | None = None
    """masked_token: of the predicted tokens, the share that a random one takes the place of."""
    mean_span: float | None = None
    """sequence_to_sequence: tokens in a span cut out of plain text, on average."""
    label_smoothing: float | None = None
    """classification: the share of each label that is spread evenly over all classes."""
    trained_on: str | None = None
    """chat_answers: what is learned of a conversation, "answers" or "everything"."""
    weigh_by: str | None = None
    """chat_answers: what counts alike, "tokens" or "conversations"."""
    packed: bool | None = None
    """chat_answers: whether conversations share rows."""
    template: str | None = None
    """chat_answers: a chat template by name ("chatml", "alpaca") or file; the tokenizer's own unless given."""

    def __post_init__(self) -> None:
        check_bounds(self, "objective")


@dataclass(frozen=True)
class Budget:
    """How long to train: exactly one of these is set."""

    steps: int | None = None
    tokens: float | None = None
    """In the unit that the data are counted in: tokens of plain text, images, examples of a dataset of one's own."""
    epochs: float | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        limits = [name for name in ("steps", "tokens", "epochs", "seconds") if getattr(self, name) is not None]
        if len(limits) > 1:
            raise UsageError(f"budget: {' and '.join(limits)} are both set", fix=f"keep one, such as {limits[0]}")
        for name in limits:
            if not (0 < getattr(self, name) < math.inf):
                raise UsageError(f"budget.{name} is {getattr(self, name)}", fix="give a positive, finite amount")

    def in_epochs_of(self, amount: float | None) -> int:
        """Return what its epochs come to where each has this amount, rounded up. Raises UsageError for None."""
        assert self.epochs is not None
        if amount is None:
            raise UsageError(
                f"a budget in epochs ({self.epochs:g}) needs data whose examples are counted: a stream, or several "
                "sources in one run, have no epochs",
                fix="--budget 500steps or --budget 10min",
            )
        return math.ceil(self.epochs * amount)


@dataclass(frozen=True)
class EvaluationSettings:
    every: Positive = 100
    """Steps between evaluations on held-out data; one at the end is always made."""
    examples: Positive = 64
    at_start: bool = False
    """Whether to evaluate before the first step too, for runs that start from a trained model."""
    judge: str = "loss"
    """The measure on held-out data that decides the best checkpoint, an early stop and a comparison: "loss", or the
    name of a metric."""
    lower_is_better: bool | None = None
    """For `judge`; by default true of the loss, and false of a metric."""
    patience: Annotated[int | None, SettingBound(least=1)] = None
    """Evaluations without an improvement after which a run stops early; never unless given."""

    def __post_init__(self) -> None:
        check_bounds(self, "evaluation")

    @property
    def is_lower_better(self) -> bool:
        return self.judge == "loss" if self.lower_is_better is None else self.lower_is_better


@dataclass(frozen=True)
class CheckpointSettings:
    every: Positive = 200
    """Steps between checkpoints; one at the end is always made."""
    keep: Positive = 2
    """How many of the newest verified checkpoints stay; the best by held-out loss stays as well."""
    extra_steps: tuple[StepOrFraction, ...] = ()
    """Further moments of the run at which a checkpoint is made, and those always stay."""

    def __post_init__(self) -> None:
        check_bounds(self, "checkpoints")


@dataclass(frozen=True)
class Recipe:
    """Everything about a run as one value; see `thrifty.recipe`."""

    name: str = "run"
    about: str = ""
    """One line for people: what the run is and what to expect of it."""
    seed: int = 0
    device: str = "auto"
    """"cpu", "cuda", or "auto" for a GPU where there is one."""
    deterministic: bool = True
    """Whether a GPU uses only kernels that give the same bits each time, so that a resumed run is the one that was not
    stopped. A processor's always do."""
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    budget: Budget = field(default_factory=lambda: Budget(steps=500))
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    checkpoints: CheckpointSettings = field(default_factory=CheckpointSettings)
    mesh: Mesh = field(default_factory=Mesh)
    python: PythonObjects = field(default_factory=PythonObjects)
    techniques: tuple[Technique, ...] = ()
    """In order of stage, whatever the order given."""
    objects: UserObjects = field(default_factory=UserObjects, compare=False, repr=False, metadata=NO_DATA)
    """Objects passed from Python, which no file spells; `python` records them."""

    def __post_init__(self) -> None:
        check_name(self.name)
        check_bounds(self, "recipe")
        ordered = sorted(self.techniques, key=lambda technique: (technique.stage, order_key(technique.name)))
        object.__setattr__(self, "techniques", tuple(ordered))
        passed = {name: text for name, text in vars(self.objects.described).items() if text}
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
        """Return a recipe that neither holds nor names these objects."""
        usual = {name: getattr(UserObjects(), name) for name in names}
        kept = {name: text for name, text in self.objects.names.items() if name not in names}
        recorded = {name: getattr(PythonObjects(), name) for name in names if name != "model"}
        return replace(
            self,
            objects=replace(self.objects, **usual, names=kept),
            python=replace(self.python, **recorded),
            model=ModelSettings() if "model" in names else self.model,
        )

    @property
    def _recorded(self) -> dict[str, str]:
        """The names of objects that the recipe records."""
        every = {"model": self.model.build, **vars(self.python), "sources": None}
        return {
            name: text if isinstance(text, str) else text[0].rpartition(" ")[2] for name, text in every.items() if text
        }

    @property
    def object_options(self) -> str | None:
        """The options that name the objects on the command line, with a space before each; None where one has no name
        there: a module, an object of a class, metrics."""
        return self._options_of(self._recorded)

    def _options_of(self, recorded: Mapping[str, str]) -> str | None:
        are_named = all(map(_is_named, (text for name, text in recorded.items() if name != "model")))
        are_named &= is_function_name(recorded.get("model", "any:model"))
        if ("model" in recorded and self.model.weights) or not are_named or recorded.keys() & {"metrics", "collate"}:
            return None
        return "".join(f" --{name.replace('_', '-')} {text}" for name, text in recorded.items())

    def resume_line(self, folder: object, fork: str = "") -> str:
        """Return the line that resumes the run of this recipe, as a command or as a call."""
        passed = {name: "…" for name in self._recorded}
        if is_function_name(self.model.build) and not self.model.weights:
            passed["model"] = str(self.model.build).rpartition(":")[2]
        if _is_named(self.python.loss):
            passed["loss"] = self.python.loss.rpartition(":")[2]
        more = [f"{name}={word}" for name, word in passed.items()] + ([f'fork="{fork}"'] if fork else [])
        call = f"thrifty.resume({', '.join([repr(str(folder)), *more])})"
        command = f"thrifty resume {shlex.quote(str(folder))}{self.object_options}" + (
            f" --fork {fork}" if fork else ""
        )
        return call if self.object_options is None else spelled(command, call)

    def refuse_missing_objects(self, *names: str) -> None:
        """Raise UsageError if an object that the recipe names (one of `names`, by default any) was not passed."""
        recorded = {name: text for name, text in self._recorded.items() if name in (names or self._recorded)}
        passed = {"model": self.objects.build, **vars(self.objects.described)}
        missing = {name: of for name, of in recorded.items() if not passed[name]}
        if not missing:
            return
        call = f"pass {', '.join(f'{name}=…' for name in recorded)} in Python"
        options = self._options_of(recorded)
        raise UsageError(
            f"the recipe has {', '.join(f'{name} from Python ({of})' for name, of in missing.items())}, which a file"
            " never runs by itself",
            fix=f"if you trust it, {call if options is None else spelled(f'add{options}', call)}",
        )


def _is_named(text: str) -> bool:
    """Return True for the name of a function or a value. Of an object the class is recorded, which is none."""
    is_class = text.startswith(("builtins:", "numpy:")) or text.rpartition(":")[2].rpartition(".")[2][:1].isupper()
    return is_function_name(text) and not is_class
