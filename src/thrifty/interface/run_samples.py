"""Sample of a run: text that its language model generates, stored in the run folder."""

from collections.abc import Mapping
from typing import Any

from thrifty.core.errors import ThriftyError, reason_of
from thrifty.reporting.run_record import RunRecord, mapping, number
from thrifty.reporting.run_state import RUNNING
from thrifty.training.run_folder import RunFolder

SAMPLED = 100
"""Number of tokens in the sample of a run."""
LARGEST = 3e8
"""Maximum number of parameters of a model whose run has a sample."""


def sample_of_run(run: Any, record: RunRecord) -> Mapping[str, Any]:
    """Return the "text" that a run's language model generates, or the "reason" why there is no text. The result is
    stored in sample.json. Return an empty mapping if the run is training, has no checkpoint or is no small language
    model.
    """
    size = number(record.explanation.get("parameters"))
    is_text = mapping(record.recipe.get("objective")).get("name", "next_token") == "next_token"
    is_own_loss = bool(mapping(record.recipe.get("python")).get("loss"))
    is_saved = (record.folder / "checkpoints" / "LATEST").is_file()
    if not is_text or is_own_loss or not is_saved or record.state.name == RUNNING or size is None or size > LARGEST:
        return {}
    if record.sample.get("step") == record.last_step and record.sample.get("text"):
        return record.sample
    from thrifty.interface.samples import sample  # imports torch

    try:
        made = {"text": sample(run, tokens=SAMPLED).text}
    except ThriftyError as error:
        made = {"reason": reason_of(error)}
    made = {"step": record.last_step, **made}
    RunFolder(record.folder).write_json("sample", made)
    return made
