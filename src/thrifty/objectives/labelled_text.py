"""Base class of objectives on labelled texts, and metrics over all held-out predictions.

Fields    "inputs" (b, t), the tokens; "keep" (b, t), False on padding; "labels". Pairs of texts also have "types"
          (b, t): 0 for tokens of the first text, 1 for tokens of the second.
"""

import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.core.classifier_inputs import classifier_inputs, takes_text
from thrifty.core.objective import Objective, Prediction

HAS_SCORES = find_spec("sklearn") is not None
"""True if scikit-learn (extra `metrics`) is installed. Without scikit-learn, accuracy is the only metric of classes."""


class LabelledTextObjective(Objective):
    """An objective on labelled texts only."""

    learns_from, needs_labels = ("labelled_text",), True

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        return Prediction(output=logits_of(model, batch))


def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits of a model for a batch.

    A model of transformers is called with the argument names of its `forward`. Other models are called as
    `model(tokens, keep)`, or `model(tokens, keep, types)` for pairs of texts.
    """
    masks = [batch[name] for name in ("keep", "types") if name in batch.fields]
    if masks and takes_text(model):
        output = model(**classifier_inputs(model, batch["inputs"], *masks))
    else:
        output = model(batch["inputs"], *masks)
    return getattr(output, "logits", output)


def class_scores(labels: np.ndarray, predicted: np.ndarray, names: Sequence[str]) -> dict[str, float]:
    """Return scikit-learn's macro F1 and Matthews correlation of labels and predictions (n,).

    For two classes, also return the F1 of the second class.
    """
    from sklearn import metrics

    scores = {
        "f1_macro": metrics.f1_score(labels, predicted, average="macro", zero_division=0),
        "matthews": metrics.matthews_corrcoef(labels, predicted),
    }
    if len(names) == 2:
        scores["f1"] = metrics.f1_score(labels, predicted, pos_label=1, zero_division=0)
    return scores


def several_class_scores(labels: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """Return scikit-learn's macro and micro F1 of multi-label indicators (n, c)."""
    from sklearn import metrics

    kinds = ("macro", "micro")
    return {f"f1_{kind}": metrics.f1_score(labels, predicted, average=kind, zero_division=0) for kind in kinds}


def tag_scores(labels: np.ndarray, predicted: np.ndarray, names: Sequence[str]) -> dict[str, float]:
    """Return scikit-learn's F1 of word tags (n,). Macro F1 is over all tags, micro F1 is without the tag "O"."""
    from sklearn import metrics

    inside = [number for number, name in enumerate(names) if name != "O"]
    return {
        "f1_macro": metrics.f1_score(labels, predicted, average="macro", zero_division=0),
        "f1_micro": metrics.f1_score(labels, predicted, labels=inside, average="micro", zero_division=0),
    }


def correlations(labels: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """Return scipy's Pearson and Spearman correlations of labels and predictions (n,); NaN if either is constant."""
    from scipy import stats

    kinds: dict[str, Callable[..., Any]] = {"pearson": stats.pearsonr, "spearman": stats.spearmanr}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # predictions are constant before the first step
        too_few = len(labels) < 2
        return {name: np.nan if too_few else float(kind(labels, predicted).statistic) for name, kind in kinds.items()}
