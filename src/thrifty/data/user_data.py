"""User data: map-style datasets (batches depend only on seed and step), and iterable datasets in their order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from thrifty.core.batches import Batch
from thrifty.core.errors import RefusedError, UsageError, for_reader
from thrifty.core.model_spec import UserModelSpec
from thrifty.data.collation import Collation
from thrifty.data.data_loading import Collate, dataset_of
from thrifty.data.epoch_sampler import HeldOutExamples
from thrifty.data.lazy_attributes import LazyAttributes
from thrifty.data.run_data import ExamplePreview
from thrifty.data.shared_examples import caution_on_shared
from thrifty.data.user_dataset import UserDataset, UserSource
from thrifty.data.user_stream import UserStream, first_examples

IDENTIFYING = 4
"""Number of examples that identify an iterable held-out dataset."""


@dataclass(frozen=True)
class UserData:
    """Opened user data, see `run_data.RunData`."""

    train: UserSource | UserStream
    held_out: HeldOutExamples
    identity: Mapping[str, str]
    collation: Collation
    examples: UserDataset | None
    """Training examples by number; None for an iterable dataset."""

    ends = UserModelSpec()
    example_unit = 1

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"unit": "examples"}

    def assembled(self, batch: Batch) -> Any:
        """Return a batch in the user's form."""
        return self.collation.assembled(batch)

    def description(self) -> dict[str, Any]:
        known = {"train_examples": len(self.examples)} if self.examples else {}
        return {**known, "held_out_examples": len(self.held_out)}

    def previews(self, numbers: Sequence[int]) -> list[ExamplePreview]:
        if self.examples is None:
            raise RefusedError("an iterable dataset has no previews", fix="pass a map-style dataset")
        with self.examples.lazy.present():
            return [ExamplePreview(number, text=repr(self.examples.dataset[number])[:500]) for number in numbers]

    def pictures(self, inputs: Tensor) -> list[str]:
        raise RefusedError("a user's dataset has no pictures", fix="set data.source to a folder of images")

    def metadata(self) -> dict[str, str]:
        return {}

    def check_meaning(self, before: Mapping[str, str], old: Path) -> None:
        if before.get("structure") != self.identity["structure"]:
            raise UsageError(
                f"batches have another form than in {str(old)!r}: {self.identity['structure']}",
                fix="pass a dataset of the old form; or start a new run",
            )


def _only_first(judged: int) -> str:
    more = for_reader(f"--set evaluation.examples={4 * judged}")
    return f"held_out is iterable: only its first {judged} examples are judged; {more} judges more"


def open_user_data(
    data: Any, held_out: Any, batch: int, seed: int, collate: Collate | None = None, judged: int = 64
) -> UserData:
    """Open the datasets or DataLoaders of a user. If `held_out` is iterable, only its first `judged` examples are used.
    `collate` joins the examples of both. Without it, each DataLoader joins its own, and a held-out dataset uses the
    function of the training data.

    Raises UsageError for any other object.
    """
    parts, others = dataset_of(data), dataset_of(held_out)
    joined, examples = collate or parts.collate, None
    lazy = LazyAttributes(*(each.dataset for each in (parts, others) if each.is_map_style))
    if parts.is_map_style:
        examples = UserDataset(parts.dataset, joined, lazy)
        train: UserSource | UserStream = UserSource(examples, batch, seed, parts)
        identity = examples.fingerprint()
        if len(examples) < batch:
            raise UsageError(
                f"the dataset has {len(examples)} examples, fewer than one batch of {batch}",
                fix=f"batch={len(examples)}",
            )
    else:
        train = UserStream(parts, batch, seed, joined)
        identity = train.fingerprint()
    rest = others.dataset if others.is_map_style else first_examples(others.dataset, judged + 1)
    if not others.is_map_style and len(rest) > judged:
        rest = rest[:judged]
        train.notices = (*train.notices, _only_first(judged))
    other = UserDataset(rest, collate or others.collate or parts.collate, lazy)
    # a resumed run may judge more examples of a stream
    identified = other if others.is_map_style else UserDataset(rest[:IDENTIFYING], other.collation.collate)
    collation = train.collation
    if other.collation.form != collation.form:
        raise UsageError(
            f"held-out batches have the form {other.collation.form}, but training batches have {collation.form}",
            fix="pass datasets whose examples have the same parts",
        )
    if parts.is_map_style and others.is_map_style:
        train.notices = (*train.notices, *caution_on_shared(data, held_out))
    differing = "; ".join(filter(None, [train.unrepeatable, other.unrepeated_words("held_out")]))
    train.unrepeatable = differing and f"{differing}: a resumed run is not bit-identical to an uninterrupted one"
    identities = {"data": identity, "held_out": identified.fingerprint(), "structure": collation.form}
    return UserData(train, HeldOutExamples(other), identities, collation, examples)
