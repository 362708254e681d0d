"""The measure by which a run is judged, and evaluations without an improvement of it."""

import math
from collections.abc import Mapping, MutableMapping

from thrifty.core.recipe import EvaluationSettings

BEST, WITHOUT_GAIN = "best_judged", "evaluations_without_gain"
"""Counters of a run's state: the best value, negative where higher is better, and the evaluations since."""


def worth(settings: EvaluationSettings, loss: float, metrics: Mapping[str, float]) -> float:
    """Return what is judged as a number that is better when it is lower; infinity for what is no number."""
    value = {"loss": loss, **metrics}[settings.judge]
    value = value if settings.is_lower_better else -value
    return math.inf if math.isnan(value) else value


def count(settings: EvaluationSettings, counters: MutableMapping[str, float], value: float) -> None:
    """Count an evaluation."""
    gained = value < counters.get(BEST, math.inf)
    counters[BEST] = min(counters.get(BEST, math.inf), value)
    counters[WITHOUT_GAIN] = 0 if gained else counters.get(WITHOUT_GAIN, 0) + 1


def reason_to_stop(settings: EvaluationSettings, counters: Mapping[str, float]) -> str:
    """Return why a run stops early, or an empty string."""
    waited = counters.get(WITHOUT_GAIN, 0)
    if settings.patience is None or waited < settings.patience:
        return ""
    return f"held-out {settings.judge} has not improved for {int(waited)} evaluations"
