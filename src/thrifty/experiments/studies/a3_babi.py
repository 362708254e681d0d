"""A3 on questions about stories: how many sentences its approximations keep, and what that costs.

Paper     Ham et al. 2020, A3: Accelerating Attention Mechanisms in Neural Networks with Approximation (HPCA), the
          columns of MemN2N on bAbI: accuracy .826 exact, .827 .825 .815 .780 .730 after a search of M = n, 3/4 n, n/2,
          n/4, n/8 rounds, which leaves .610 .569 .493 .370 .271 of the sentences; .825 to .826 for T = 1 to 20 %, which
          alone leaves .201 to .051; .816 for the conservative setting (n/2, 5 %), .730 for the aggressive one (n/8,
          10 %), with .781 and .623 of the two largest weights among what is kept.
Note      the stories are ours (`experiments/tasks/babi_stories.py`: seven kinds of questions, 20 sentences on average
          and 50 at most as
          in the paper), so that no number need agree, only the shape. As there the model is trained exactly and
          approximated afterwards, in all three hops. n is how many sentences a story has. Numbers are whole, not of 9
          bits.
"""

from collections.abc import Callable
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor, nn

from thrifty.composition.compose import BaseRun, compose
from thrifty.data.epoch_sampler import EpochSource
from thrifty.experiments.study import Cells, MeasuredQuantity, Study, StudyPlot
from thrifty.experiments.tasks.babi_stories import SENTENCES, WORDS, StoryExamples, make_stories
from thrifty.experiments.tasks.memory_network import MemoryNetwork, softmax_weights
from thrifty.experiments.tasks.whole_run import run_to_end
from thrifty.kernels.attention_filters.a3_filter import a3_candidates, post_scored
from thrifty.kernels.attention_filters.keep_masks import with_one
from thrifty.objectives.classification import Classification
from thrifty.techniques.gradients.clip import GradientClipping
from thrifty.techniques.optimizers.adamw import AdamW
from thrifty.techniques.schedules.linear import LinearDecay

SEARCHED = {"M = n": 1.0, "M = 3/4 n": 0.75, "M = n/2": 0.5, "M = n/4": 0.25, "M = n/8": 0.125}
PERCENT = {"T = 1 %": 1.0, "T = 2.5 %": 2.5, "T = 5 %": 5.0, "T = 10 %": 10.0, "T = 20 %": 20.0}
EXACT, CONSERVATIVE, AGGRESSIVE = "exact", "conservative: M = n/2, T = 5 %", "aggressive: M = n/8, T = 10 %"
PAPER_KEPT = {"M = n": 61.0, "M = 3/4 n": 56.9, "M = n/2": 49.3, "M = n/4": 37.0, "M = n/8": 27.1}
"""Percent of the sentences that are candidates in the paper's figure."""


def approximated(
    searched: float, percent: float, seen: Callable[[Tensor, Tensor, Tensor], None], state: Tensor, memories: Tensor,
    there: Tensor,
) -> Tensor:  # fmt: skip
    """Weights (b, n) that a state (b, d) gives to memories (b, n, d) which A3 keeps of those `there` (b, n): of a
    search of `searched` · n rounds, and of those with `percent` of the largest weight; 0 leaves either out."""
    scores, visible = torch.einsum("bd,bnd->bn", state, memories), there
    if searched:
        visible = a3_candidates(state[:, None, None], memories[:, None], searched, there[:, None, None])[:, 0, 0]
    visible = with_one(visible, scores, there)
    keep = post_scored(visible, scores, percent) if percent else visible
    seen(keep, softmax_weights(state, memories, there), there)
    return softmax_weights(state, memories, keep)


class KeptSentenceCounter:
    """Sentences, kept ones, and how many of the two of largest weight are among those, over hops and stories."""

    def __init__(self) -> None:
        self.kept = self.there = self.largest = self.found = 0

    def __call__(self, keep: Tensor, exact: Tensor, there: Tensor) -> None:
        best = exact.topk(2, dim=-1).indices
        self.kept += int(keep.sum())
        self.there += int(there.sum())
        self.found += int(keep.gather(1, best).sum())
        self.largest += best.numel()


@cache
def trained(seed: int, stories: int, steps: int, width: int, batch: int, tying: str) -> MemoryNetwork:
    """A network at the end of its run, which knows nothing of A3."""

    def build() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return MemoryNetwork(len(WORDS), SENTENCES, width, tying=tying)  # type: ignore[arg-type]

    plain = BaseRun(build, EpochSource(examples(stories, False), batch, seed), Classification())
    run = compose(plain, [AdamW(lr=1e-2, weight_decay=0.0), LinearDecay(warmup=0.05), GradientClipping()], steps)
    model, _ = run_to_end(run, seed)
    assert isinstance(model, MemoryNetwork)
    return model.eval()


@cache
def examples(stories: int, held_out: bool) -> StoryExamples:
    """The same for every seed of a model."""
    return make_stories(stories, held_out)


@torch.no_grad()
def measure(
    seed: int,
    searched: float,
    percent: float,
    stories: int,
    tested: int,
    steps: int,
    width: int,
    batch: int,
    tying: str,
) -> dict[str, float]:
    with torch.enable_grad():
        model = trained(seed, stories, steps, width, batch, tying)
    tests, counting = examples(tested, True), KeptSentenceCounter()
    fields = tests.fields(np.arange(tested))
    model.weigh = partial(approximated, searched, percent, counting)
    right = model(fields["inputs"]).argmax(-1) == fields["labels"]
    model.weigh = softmax_weights
    of_kinds = [right[torch.from_numpy(tests.kinds == kind)].float().mean() for kind in np.unique(tests.kinds)]
    return {
        "accuracy": 100 * float(right.float().mean()),
        "kept": 100 * counting.kept / counting.there,
        "recall": 100 * counting.found / counting.largest,
        "worst": 100 * float(min(of_kinds)),
    }


def a3_babi(
    seeds: int = 3,
    stories: int = 12000,
    tested: int = 2000,
    steps: int = 2000,
    width: int = 64,
    batch: int = 64,
    tying: str = "adjacent",
) -> Study:
    """A memory network of three hops that answers questions about stories, under A3's search and its threshold.

    Command   thrifty study a3_babi
    Expect    the shape of the paper's columns, steeper: 84.7 % exact (the paper's 82.6), then 83.8, 82.9, 79.7, 70.3
              and 60.9 % as the search gets shorter (its 82.7 to 73.0), which leaves 48 to 13 % of the sentences (its 61
              to 27). A threshold alone costs nothing: 84.4 % with 7 % of the sentences. So the conservative setting
              loses 5 points and the aggressive one 24, where the paper's lose 1 and 10; three of six statements, those
              on how much, do not hold. Why this search finds fewer is not known. Ten minutes of one core.
    """
    fixed = {"stories": stories, "tested": tested, "steps": steps, "width": width, "batch": batch, "tying": tying}
    chosen = {EXACT: (0.0, 0.0), CONSERVATIVE: (0.5, 5.0), AGGRESSIVE: (0.125, 10.0)}
    chosen |= {label: (share, 0.0) for label, share in SEARCHED.items()}
    chosen |= {label: (0.0, percent) for label, percent in PERCENT.items()}
    cases = {label: {"searched": share, "percent": percent, **fixed} for label, (share, percent) in chosen.items()}

    def lost(cells: Cells, label: str) -> float:
        """Points of accuracy below the exact model's."""
        return cells[EXACT]["accuracy"] - cells[label]["accuracy"]

    def falls(cells: Cells, labels: dict[str, float], quantity: str) -> bool:
        numbers = [cells[label][quantity] for label in labels]
        return numbers == sorted(numbers, reverse=True)

    return Study(
        measure=measure,
        cases=cases,
        quantities={
            "accuracy": MeasuredQuantity("held-out questions answered right, percent"),
            "kept": MeasuredQuantity("sentences with a weight, percent, over all hops"),
            "recall": MeasuredQuantity("of the two sentences of largest weight, those that are kept, percent"),
            "worst": MeasuredQuantity("the same as accuracy, of the kind of question that is answered worst"),
        },
        seeds=seeds,
        expect={
            "a search of n rounds costs less than a point": lambda c: lost(c, "M = n") < 1,
            "the shorter the search, the fewer sentences are kept, and the fewer questions answered": lambda c: (
                falls(c, SEARCHED, "kept") and falls(c, SEARCHED, "accuracy")
            ),
            "a search leaves within 15 points of the share of the paper's figure, at every M": lambda c: all(
                abs(c[label]["kept"] - kept) < 15 for label, kept in PAPER_KEPT.items()
            ),
            "n/2 rounds cost less than 3 points (the paper's 1.1), n/8 rounds 5 to 20 (its 9.6)": lambda c: (
                lost(c, "M = n/2") < 3 and 5 < lost(c, "M = n/8") < 20
            ),
            (
                "a threshold of 20 % alone costs less than a point and leaves less than a fifth of the sentences"
            ): lambda c: lost(c, "T = 20 %") < 1 and c["T = 20 %"]["kept"] < 20,
            (
                "the conservative setting costs less than 3 points (the paper's 1.0), the aggressive one 5 to 20 (9.6)"
            ): lambda c: lost(c, CONSERVATIVE) < 3 and 5 < lost(c, AGGRESSIVE) < 20,
        },
        plots=[
            StudyPlot("accuracy", "Answered right by percent of sentences kept", x="kept", y="accuracy", by="percent"),
            StudyPlot("kept", "Sentences kept, percent", y="kept"),
        ],
        minutes=5,
    )
