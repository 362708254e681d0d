"""Sequence length warmup (Li et al. 2022): train on short texts first, then on longer texts.

Paper       Li, Zhang and He 2022, The Stability-Efficiency Dilemma (arXiv 2108.06084). CompoundGrow (Gu et al. 2021,
            arXiv 2010.12562) also grows the text length.
Promise     Early steps are cheaper and more stable. The cost of attention grows with the square of the text length, and
            the cost of other layers grows with the length.
Use         loader = thrifty.apply(loader, "sequence_length", total_steps=10_000)
Start with  `sequence_length:start=64,until=0.3`. Raise `until` for a longer warmup if the loss is unstable.
Cost        Early steps train on fewer tokens. With `compile` the model is compiled once per length.
Avoid       Budgets in tokens instead of seconds, because early steps see fewer tokens.
Does not    Shorten texts in evaluation.
"""

from thrifty.core.batches import Batch, BatchSource, MappedSource
from thrifty.core.claims import Claim
from thrifty.core.run_relative_settings import MovingMoment
from thrifty.core.setting_bounds import Positive
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.modeling.text_lengths import refuse_lost_labels, text_length, truncate_texts, whole_batch
from thrifty.techniques.curriculum._size_schedule import phased_size


class SequenceLengthWarmup(Technique):
    """Lengths grow in equal steps and are multiples of `multiple`, so that few shapes are compiled. In your own loop,
    each batch of the loader counts as a step.
    """

    stage, numerics = Stage.RESHAPE, Numerics.DIFFERENT
    claims = frozenset({Claim.SEQUENCE_LENGTH})

    start: Positive = 64
    """Number of tokens per example in the first phase."""
    until: MovingMoment = 0.3
    """First step with texts of full length."""
    phases: Positive = 4
    """Number of phases with shorter texts."""
    multiple: Positive = 8
    """Common divisor of the lengths of shortened texts, in tokens."""

    def batches(self, source: BatchSource) -> BatchSource:
        def shorten(step: int, batch: Batch) -> Batch:
            if step >= int(self.until):
                text_length(batch, self.name)  # which refuses other data in every step
                return batch
            whole = whole_batch(source, step, batch)
            full = text_length(whole, self.name)
            length = phased_size(step, min(self.start, full), full, int(self.until), self.multiple, self.phases)
            refuse_lost_labels(whole, length, self.name, self._longer_start)
            return truncate_texts(batch, length)

        return MappedSource(source, shorten)

    def _longer_start(self, least: int) -> str:
        return f"--set techniques.{self.name}.start={-(-least // self.multiple) * self.multiple} or more"
