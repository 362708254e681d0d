"""Scores of training examples as a file: what they are, whose they are, and what they cost.

safetensors with
    scores                         float32 (n,), the mean over runs; higher is harder, whatever they were scored by
    runs                           float32 (r, n), those of each run
    labels                         int64 (n,), where examples have classes
    predicted, confidence, own     int64, float32, float32 (n,), where a classifier was trained: see `PredictedLabels`
and one entry of JSON as metadata (`ScoreProvenance`), which has the fingerprint of the examples: the scores of other
data are no
use. A recipe names a file together with its sha256.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from thrifty.core.errors import IntegrityError, UsageError
from thrifty.core.old_names import rename_recipe
from thrifty.core.tensor_tracing import untraced

KEY = "thrifty-scores"
FORMAT = 1
TYPES = dict.fromkeys(("scores", "runs", "confidence", "own"), torch.float32)
TYPES |= dict.fromkeys(("labels", "predicted"), torch.int64)


@dataclass(frozen=True)
class PredictedLabels:
    """What the models that scored would have answered, each (n,)."""

    predicted: Tensor
    """The label for which the runs speak most."""
    confidence: Tensor
    """The mean probability that the runs which answered so gave it, counting 0 for every other run."""
    own: Tensor
    """The mean probability of the example's own label."""

    def suspicion(self, labels: Tensor) -> Tensor:
        """How much more another label is believed than the own one (n,), 0 where the own one is predicted."""
        return torch.where(self.predicted == labels, 0.0, (self.confidence - self.own).clamp(min=0))


@dataclass(frozen=True)
class ScoreProvenance:
    method: str
    """What was scored by: el2n, grand, …"""
    fingerprint: str
    """Fingerprint of the examples, see `core.batches.ExampleIndex`."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """The recipe of the scoring runs, as tables; its seed is that of the first."""
    recipe_sha256: str = ""
    data: Mapping[str, str] = field(default_factory=dict)
    """The sha256 of the files that the examples come from."""
    label_names: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    steps: int = 0
    """Steps that each run was trained for."""
    steps_of_recipe: int = 0
    """Steps of the whole run, to which schedules were set."""
    flops: float = 0.0
    """Spent on all of it, training and scoring."""
    seconds: float = 0.0
    model: str = ""
    """The folder of the model that embedded the examples, where one was given."""
    thrifty: str = ""


@dataclass(frozen=True)
class ExampleScores:
    scores: Tensor
    runs: Tensor
    facts: ScoreProvenance
    labels: Tensor | None = None
    guesses: PredictedLabels | None = None

    def __len__(self) -> int:
        return len(self.scores)

    def label(self, number: int) -> str:
        """The name of a label."""
        names = self.facts.label_names
        return names[number] if number < len(names) else str(number)


def scores_bytes(scores: ExampleScores) -> bytes:
    """The file; the same scores and facts are the same bytes."""
    tensors = {"scores": scores.scores.float(), "runs": scores.runs.float()}
    if scores.labels is not None:
        tensors["labels"] = scores.labels
    if scores.guesses is not None:
        tensors |= vars(scores.guesses)
    facts = json.dumps({"format": FORMAT, **asdict(scores.facts)}, sort_keys=True)
    return save({name: tensor.clone() for name, tensor in tensors.items()}, {KEY: facts})  # of one run both are one


def file_hash(path: Path) -> str:
    """The sha256 of a scores file; raises UsageError where there is none."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UsageError(
            f"there is no scores file {path}: {error.strerror}", fix="make one: thrifty data score RECIPE --out FILE"
        ) from None


def read_scores(path: Path) -> ExampleScores:
    """Raises UsageError where there is no file, IntegrityError where it holds no scores."""
    file_hash(path)
    with untraced(), unset_fake_temporarily():  # real where all else is counted on fake tensors
        try:
            with safe_open(path, "pt") as file:
                told = (file.metadata() or {})[KEY]
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            facts = _facts(json.loads(told))
            _check(tensors)
            answers = [tensors[field.name] for field in fields(PredictedLabels)] if "predicted" in tensors else None
            guesses = PredictedLabels(*answers) if answers else None
        except (SafetensorError, AttributeError, KeyError, ValueError, TypeError) as error:
            what = "it has no facts of scores" if isinstance(error, KeyError) and error.args == (KEY,) else str(error)
            raise IntegrityError(f"{path} is no scores file: {what}", fix="score again: thrifty data score") from None
        return ExampleScores(tensors["scores"], tensors["runs"], facts, tensors.get("labels"), guesses)


def _facts(told: dict[str, Any]) -> ScoreProvenance:
    if told.pop("format") != FORMAT:
        raise ValueError(f"its format is not {FORMAT}, which this version reads")
    told["recipe"] = rename_recipe(told["recipe"])
    lists = {name: tuple(value) for name, value in told.items() if isinstance(value, list)}
    return ScoreProvenance(**(told | lists))


def _check(tensors: Mapping[str, Tensor]) -> None:
    count = len(tensors["scores"])
    for name, tensor in tensors.items():
        wanted = (len(tensor), count) if name == "runs" else (count,)
        if name not in TYPES or tensor.dtype != TYPES[name] or tensor.shape != wanted:
            raise ValueError(f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}")
    if not tensors["scores"].isfinite().all():
        raise ValueError("a score is not finite")
    if len(tensors["runs"]) == 0 or count == 0:
        raise ValueError("it has no scores")


def average_scores(parts: Sequence[ExampleScores]) -> ExampleScores:
    """The scores of several runs by the same method as those of one: means, and what all of them cost."""
    runs, facts = torch.cat([part.runs for part in parts]), [part.facts for part in parts]
    told = replace(
        facts[0],
        seeds=tuple(seed for each in facts for seed in each.seeds),
        flops=sum(each.flops for each in facts),
        seconds=sum(each.seconds for each in facts),
    )
    guesses = [part.guesses for part in parts if part.guesses is not None]
    voted = _voted(guesses) if len(guesses) == len(parts) else None
    return ExampleScores(runs.double().mean(0).float(), runs, told, parts[0].labels, voted)


def _voted(guesses: Sequence[PredictedLabels]) -> PredictedLabels:
    predicted = torch.stack([each.predicted for each in guesses])
    confidence = torch.stack([each.confidence for each in guesses]).double()
    support = torch.stack([(confidence * (predicted == each.predicted)).sum(0) for each in guesses])
    best = support.argmax(0, keepdim=True)
    own = torch.stack([each.own for each in guesses]).double().mean(0)
    believed = support.gather(0, best).squeeze(0) / len(guesses)
    return PredictedLabels(predicted.gather(0, best).squeeze(0), believed.float(), own.float())
