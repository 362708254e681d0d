"""Sequence-length warm-up: short examples first.

Paper     Li, Zhang & He 2022, The Stability-Efficiency Dilemma (arXiv 2108.06084); part of CompoundGrow
          (Gu et al. 2021, arXiv 2010.12562).
Promise   cheaper and steadier early steps: attention costs length squared, everything else length.
Use       loader = thrifty.apply(loader, "sequence_length", total_steps=10_000), counted in batches
Avoid     when tokens, not seconds, are the budget: early steps see fewer of them.
Note      lengths rise in equal steps and are multiples of `multiple`, so that few shapes are compiled.
"""

from thrifty.core.batches import Batch, BatchSource, MappedSource
from thrifty.core.claims import Claim
from thrifty.core.run_relative_settings import StepOrFraction
from thrifty.core.setting_bounds import Positive
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.modeling.text_lengths import has_only_text, text_length, truncate_texts
from thrifty.techniques.curriculum._size_schedule import phased_size


class SequenceLengthWarmup(Technique):
    stage, numerics = Stage.RESHAPE, Numerics.DIFFERENT
    claims = frozenset({Claim.SEQUENCE_LENGTH})

    start: Positive = 64
    """Tokens per example in the first phase."""
    until: StepOrFraction = 0.3
    phases: Positive = 4
    multiple: Positive = 8

    def batches(self, source: BatchSource) -> BatchSource:
        def shorten(step: int, batch: Batch) -> Batch:
            full = text_length(batch, self.name)
            is_part = len(batch.weight) < source.size(step) and not has_only_text(batch)
            if is_part and step < int(self.until):  # padded to its own longest text
                full = text_length(source.at(step), self.name)
            length = phased_size(step, min(self.start, full), full, int(self.until), self.multiple, self.phases)
            return truncate_texts(batch, length)

        return MappedSource(source, shorten)
