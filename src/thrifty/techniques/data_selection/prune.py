"""Data pruning (Paul et al. 2021): train on a subset of examples selected by difficulty scores.

Paper       Paul, Ganguli and Dziugaite 2021, Deep Learning on a Data Diet (arXiv 2107.07075), keeps the hardest
            examples. Sorscher et al. 2022, Beyond neural scaling laws (arXiv 2206.14486), keeps the easiest examples if
            data is scarce. Sorscher et al. keep of each class at least 50 % of the mean number kept per class
            (unverified).
Promise     Training on fewer examples reaches nearly the same quality. Paul et al. report no loss of quality with half
            of CIFAR-10, selected by EL2N.
Use         texts = thrifty.apply(texts, "prune", order="random")
            loader = torch.utils.data.DataLoader(texts, batch_size=8, shuffle=True)
Start with  `prune:order=random,keep=0.5` as the control. Then use `order=hard` with scores from `thrifty data score`.
Cost        Scoring trains models; `thrifty data score` reports its FLOPs and seconds. Scoring pays off if several runs
            share one score file.
Avoid       Hard examples without `drop_hardest` if labels may be wrong, because wrong labels score hardest. GraNd
            scores at initialization, which are no better than random (Kirsch 2023, arXiv 2303.14753).
Does not    Shorten the run, which has the same number of steps over fewer examples, or prune held-out data.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from thrifty.core.batches import BatchSource, ExampleSubset
from thrifty.core.errors import IntegrityError, RefusedError, ThriftyError, UsageError
from thrifty.core.randomness import keyed_generator
from thrifty.core.run_notes import add_note
from thrifty.core.score_file import ExampleScores, file_hash, read_scores
from thrifty.core.setting_bounds import Fraction, Positive, Probability, SettingBound
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.core.tensor_tracing import untraced

Order = Literal["hard", "easy", "auto", "random"]
LISTED_CLASSES = 10
"""Maximum number of classes listed in a note. With more classes, only classes with the fewest and most kept examples
are listed.
"""


def kept_examples(
    scores: Tensor,
    labels: Tensor | None,
    keep: float,
    order: str = "hard",
    drop_hardest: float = 0.0,
    min_class_share: float = 0.0,
    seed: int = 0,
) -> Tensor:
    """Return the ascending indices (k,) of the examples to keep, from their scores (n,). k is round(keep · n), at least
    1.

    First the round(drop_hardest · n) examples with the highest scores are dropped. Then at least floor(min_class_share
    · k / classes) examples of each class in `labels` (n,) are kept, or the whole class if it is smaller. `order`
    selects the rest: hardest, easiest or random examples. With equal scores the first example counts as harder. Raises
    RefusedError if `keep` plus `drop_hardest` exceeds 1.
    """
    count, dropped = max(round(keep * len(scores)), 1), round(drop_hardest * len(scores))
    chosen = scores.argsort(descending=True, stable=True)[dropped:]
    if keep + drop_hardest > 1 + 1e-9 or not len(chosen):
        raise RefusedError(
            f"keep '{keep:g}' plus drop_hardest '{drop_hardest:g}' exceeds 1",
            fix=f"keep = {max(1 - drop_hardest, 0):g}",
        )
    count = min(count, len(chosen))  # keep and drop_hardest may both be rounded up
    if order == "easy":
        chosen = chosen.flip(0)
    elif order == "random":
        chosen = chosen.sort().values[torch.randperm(len(chosen), generator=keyed_generator(f"prune/{seed}"))]
    if labels is not None and min_class_share:
        chosen = _classes_first(chosen, labels[chosen], min_class_share, count)
    return chosen[:count].sort().values


def _classes_first(chosen: Tensor, labels: Tensor, min_class_share: float, count: int) -> Tensor:
    """Reorder examples so that the minimum number of each class comes before all other examples."""
    classes, class_index = labels.unique(return_inverse=True)
    by_class = class_index.argsort(stable=True)
    starts = class_index.bincount().cumsum(0) - class_index.bincount()
    rank = torch.empty_like(class_index)
    rank[by_class] = torch.arange(len(class_index)) - starts[class_index[by_class]]
    is_first = rank < int(min_class_share * count / len(classes))
    return torch.cat([chosen[is_first], chosen[~is_first]])


def order_by_abundance(count: int, labels: Tensor | None, abundant_from: int) -> Literal["hard", "easy"]:
    """Return "hard" if `count` kept examples are at least `abundant_from` per class on average, else "easy"."""
    classes = 1 if labels is None else len(labels.unique())
    return "hard" if count >= abundant_from * classes else "easy"


@lru_cache(maxsize=4)
def _read(file: str, sha256: str) -> ExampleScores:
    path = Path(file).expanduser()
    actual = file_hash(path)
    if not sha256:
        raise UsageError(f"the settings have no hash of the score file '{path}'", fix=f"set sha256 = {actual!r}")
    if actual != sha256:
        raise IntegrityError(
            f"'{path}' is not the score file of the recipe: its sha256 is {actual[:12]}…, not {sha256[:12]}…",
            fix=f"restore the old file; or start a new run with sha256 = {actual!r}",
        )
    return read_scores(path)


class PrunedExamples(Technique):
    """Order "random" requires no score file. Order "auto" keeps the hardest examples if the average class keeps at
    least `abundant_from` examples, otherwise the easiest examples. Data without labels count as one class. "auto" is a
    rule of thumb: the turning point depends on the task. Scores belong to one set of examples and are refused for other
    data. A trained model runs and is exported without the score file."""

    stage, numerics = Stage.SOURCE, Numerics.DIFFERENT

    scores: str = ""
    """Path of a score file, written by `thrifty data score`."""
    sha256: str = ""
    """Hexadecimal SHA-256 of the score file. A changed file is refused."""
    keep: Fraction = 0.5
    """Fraction of the training examples to keep."""
    order: Order = "hard"
    """Examples to keep: "hard", "easy", "random", or "auto", which selects hard or easy by `abundant_from`."""
    drop_hardest: Annotated[float, SettingBound(least=0, below=1)] = 0.0
    """Fraction of all examples to drop first. These are the hardest examples, which include mislabeled and broken
    examples.
    """
    min_class_share: Probability = 0.5
    """Minimum number of kept examples of a class, as a fraction of (kept examples / classes); 0 for no minimum."""
    abundant_from: Positive = 50
    """Minimum number of kept examples per class, on average, for which order "auto" keeps the hardest."""
    seed: int = 0
    """Seed of order "random"."""

    @property
    def optional_seams(self) -> frozenset[str]:
        return frozenset({"model"})

    def kept(self, scores: Tensor, labels: Tensor | None) -> Tensor:
        """Return the indices (k,) of the examples to keep. `scores` and `labels` (n,) are of all examples."""
        with untraced(), unset_fake_temporarily():  # real tensors, also while FLOPs are counted on fake tensors
            order = self.chosen_order(len(scores), labels)
            return kept_examples(scores, labels, self.keep, order, self.drop_hardest, self.min_class_share, self.seed)

    def chosen_order(self, count: int, labels: Tensor | None) -> Order:
        if self.order != "auto":
            return self.order
        return order_by_abundance(max(round(self.keep * count), 1), labels, self.abundant_from)

    def read(self) -> ExampleScores | None:
        """Read the score file. Return None if the order requires no scores. Raises UsageError or IntegrityError for a
        bad file."""
        if self.scores:
            return _read(self.scores, self.sha256)
        if self.order != "random":
            raise UsageError(
                f"{self.name}: order is {self.order!r}, which requires a score file",
                fix="thrifty data score RECIPE --method el2n --out FILE, then set scores and sha256; or order = random",
            )
        if self.drop_hardest:
            raise UsageError(
                f"{self.name}: drop_hardest requires a score file",
                fix="thrifty data score RECIPE --method el2n --out FILE, then set scores and sha256",
            )
        return None

    def batches(self, source: BatchSource) -> BatchSource:
        table = self.read()
        try:
            index = source.example_index()
            if table is None:
                return source.subset(ExampleSubset(self.kept(torch.zeros(index.count), index.labels)))
            if index.fingerprint != table.facts.fingerprint:
                raise RefusedError(
                    f"'{self.scores}' scores {len(table):,} examples of other data than these {index.count:,} "
                    f"examples: their hashes are {table.facts.fingerprint[:12]}… and {index.fingerprint[:12]}…",
                    fix="score this data: thrifty data score RECIPE --out FILE",
                )
            return source.subset(ExampleSubset(self.kept(table.scores, table.labels), table.scores))
        except RefusedError as error:
            raise RefusedError(f"{self.name}: {error.what}", fix=error.fix) from None

    def model(self, model: nn.Module) -> nn.Module:
        try:
            table = self.read()
        except ThriftyError as error:  # a trained model requires no scores; `batches` refuses a training run
            add_note(f"the kept examples are unknown: {error.what}")
            return model
        if table is None:
            add_note(f"keeps a random {self.keep:.3g} of the examples")
            return model
        kept, facts = self.kept(table.scores, table.labels), table.facts
        order = self.chosen_order(len(table), table.labels)
        add_note(f"keeps {len(kept):,} of {len(table):,} examples, order {order} by {facts.method}")
        if table.labels is not None:
            add_note("kept of each class: " + _by_class(table, kept.tolist()))
        runs = len(table.runs)
        add_note(
            f"scoring cost {facts.flops:.3g} FLOP and {facts.seconds:.3g} s in {runs} run{'s' if runs > 1 else ''}"
        )
        return model


def _by_class(table: ExampleScores, kept: Sequence[int]) -> str:
    assert table.labels is not None
    with untraced(), unset_fake_temporarily():
        whole = table.labels.bincount().tolist()
        rest = table.labels[kept].bincount(minlength=len(whole)).tolist()
    rows = [(rest[label], f"{table.label(label)} {rest[label]:,}/{whole[label]:,}") for label in range(len(whole))]
    if len(rows) > LISTED_CLASSES:
        rows.sort()
        rows = [*rows[:3], (0, "…"), *rows[-2:]]
    return ", ".join(text for _, text in rows)
