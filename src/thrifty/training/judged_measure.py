"""The measure that selects the best checkpoint, and the count of evaluations without improvement."""

import math
from collections.abc import Mapping, MutableMapping

from thrifty.core.recipe import EvaluationSettings

BEST, WITHOUT_GAIN = "best_judged", "evaluations_without_gain"
"""Keys of a run's counters: the best value (negated if higher is better), and the number of evaluations since then."""


def worth(settings: EvaluationSettings, loss: float, metrics: Mapping[str, float]) -> float:
    """Return the measure that `settings.judge` names, negated if higher is better; infinity for NaN."""
    value = {"loss": loss, **metrics}[settings.judge]
    value = value if settings.is_lower_better else -value
    return math.inf if math.isnan(value) else value


def count(settings: EvaluationSettings, counters: MutableMapping[str, float], value: float) -> None:
    """Update the best value and the number of evaluations without improvement."""
    gained = value < counters.get(BEST, math.inf)
    counters[BEST] = min(counters.get(BEST, math.inf), value)
    counters[WITHOUT_GAIN] = 0 if gained else counters.get(WITHOUT_GAIN, 0) + 1


def reason_to_stop(settings: EvaluationSettings, counters: Mapping[str, float]) -> str:
    """Return the reason for an early stop, or an empty string."""
    evaluations = counters.get(WITHOUT_GAIN, 0)
    if settings.patience is None or evaluations < settings.patience:
        return ""
    since = "1 evaluation" if evaluations == 1 else f"{int(evaluations)} evaluations"
    return f"held-out {settings.judge} has not improved for {since}"
