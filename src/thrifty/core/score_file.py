"""Score file: scores of n training examples from r runs, their origin and their cost.

A safetensors file with
    scores                         float32 (n,), the mean over runs; higher is harder for every method
    runs                           float32 (r, n), the scores of each run
    labels                         int64 (n,), if examples have classes
    predicted, confidence, own     int64, float32, float32 (n,), if a classifier was trained: see `PredictedLabels`
and one JSON metadata entry (`ScoreProvenance`). The fingerprint in this entry must match the examples that the
scores are used for. A recipe names a score file together with its sha256.
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
    """Labels that the scoring models predict for n examples, each tensor (n,)."""

    predicted: Tensor
    """Predicted label with the most support over runs."""
    confidence: Tensor
    """Mean probability of the predicted label over runs. A run that predicts another label counts as 0."""
    own: Tensor
    """Mean probability of the example's own label."""

    def suspicion(self, labels: Tensor) -> Tensor:
        """Return the probability of the predicted label minus the probability of the own label for each example, (n,).
        The minimum is 0."""
        return torch.where(self.predicted == labels, 0.0, (self.confidence - self.own).clamp(min=0))


@dataclass(frozen=True)
class ScoreProvenance:
    method: str
    """Scoring method: el2n, grand, …"""
    fingerprint: str
    """Fingerprint of the examples; see `core.batches.ExampleIndex`."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """Recipe of the scoring runs, as tables, with the seed of the first run."""
    recipe_sha256: str = ""
    data: Mapping[str, str] = field(default_factory=dict)
    """The sha256 of each file that the examples come from."""
    label_names: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    steps: int = 0
    """Number of training steps of each run."""
    steps_of_recipe: int = 0
    """Number of steps of the recipe's whole run, which determines the schedules."""
    flops: float = 0.0
    """FLOPs of training and scoring together."""
    seconds: float = 0.0
    model: str = ""
    """Folder of the model that embedded the examples; empty if no model did."""
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
        """Return the name of a label, or its number if it has no name."""
        names = self.facts.label_names
        return names[number] if number < len(names) else str(number)


def scores_bytes(scores: ExampleScores) -> bytes:
    """Return the content of the score file. Equal scores and provenance produce equal bytes."""
    tensors = {"scores": scores.scores.float(), "runs": scores.runs.float()}
    if scores.labels is not None:
        tensors["labels"] = scores.labels
    if scores.guesses is not None:
        tensors |= vars(scores.guesses)
    facts = json.dumps({"format": FORMAT, **asdict(scores.facts)}, sort_keys=True)
    return save(
        {name: tensor.clone() for name, tensor in tensors.items()}, {KEY: facts}
    )  # clone, because scores and runs of one run share memory


def file_hash(path: Path) -> str:
    """Return the sha256 of a score file. Raise UsageError if the file cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UsageError(
            f"there is no score file '{path}': {error.strerror}", fix="make one: thrifty data score RECIPE --out FILE"
        ) from None


def read_scores(path: Path) -> ExampleScores:
    """Return the scores in a file. Raise UsageError if the file cannot be read, IntegrityError if the file is not
    valid."""
    file_hash(path)
    with untraced(), unset_fake_temporarily():  # real tensors even inside a fake-tensor count
        try:
            with safe_open(path, "pt") as file:
                metadata = (file.metadata() or {})[KEY]
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            facts = _facts(json.loads(metadata))
            _check(tensors)
            labels = [tensors[field.name] for field in fields(PredictedLabels)] if "predicted" in tensors else None
            guesses = PredictedLabels(*labels) if labels else None
        except (SafetensorError, AttributeError, KeyError, ValueError, TypeError) as error:
            is_other_file = isinstance(error, KeyError) and error.args == (KEY,)
            what = f"it has no metadata entry {KEY!r}" if is_other_file else str(error)
            fix = "score again: thrifty data score RECIPE --out FILE"
            raise IntegrityError(f"'{path}' is not a score file: {what}", fix) from None
        return ExampleScores(tensors["scores"], tensors["runs"], facts, tensors.get("labels"), guesses)


def _facts(data: dict[str, Any]) -> ScoreProvenance:
    if data.pop("format") != FORMAT:
        raise ValueError(f"its format is not {FORMAT}, which this version reads")
    data["recipe"] = rename_recipe(data["recipe"])
    lists = {name: tuple(value) for name, value in data.items() if isinstance(value, list)}
    return ScoreProvenance(**(data | lists))


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
    """Return the mean scores of several runs by one method, with the total cost of the runs."""
    runs, facts = torch.cat([part.runs for part in parts]), [part.facts for part in parts]
    merged = replace(
        facts[0],
        seeds=tuple(seed for each in facts for seed in each.seeds),
        flops=sum(each.flops for each in facts),
        seconds=sum(each.seconds for each in facts),
    )
    guesses = [part.guesses for part in parts if part.guesses is not None]
    voted = _voted(guesses) if len(guesses) == len(parts) else None
    return ExampleScores(runs.double().mean(0).float(), runs, merged, parts[0].labels, voted)


def _voted(guesses: Sequence[PredictedLabels]) -> PredictedLabels:
    predicted = torch.stack([each.predicted for each in guesses])
    confidence = torch.stack([each.confidence for each in guesses]).double()
    support = torch.stack([(confidence * (predicted == each.predicted)).sum(0) for each in guesses])
    best = support.argmax(0, keepdim=True)
    own = torch.stack([each.own for each in guesses]).double().mean(0)
    mean = support.gather(0, best).squeeze(0) / len(guesses)
    return PredictedLabels(predicted.gather(0, best).squeeze(0), mean.float(), own.float())
