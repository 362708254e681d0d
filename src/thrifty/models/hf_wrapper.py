"""Models of `transformers` that answer as our own models do; their parameters keep their names under `lm.`.

Usually a model gives hidden states (b, t, d), and `model.head(hidden)` their logits (b, t, v). Some architectures do
more between hidden state and logits than one module (a soft cap, a scale, a projection). For those **`head` is None and
the model gives logits (b, t, v)**; a chunked loss is then not possible. Which of the two holds is measured when the
model is wrapped, and so is what its tokens can see.
"""

from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from thrifty.core.classifier_inputs import classifier_inputs
from thrifty.core.errors import RefusedError
from thrifty.models.text_generation import eval_mode
from thrifty.models.transformer import Task, segment_positions


class HuggingFaceModel(nn.Module):
    """What the three kinds share. `lm` is the model of transformers, whose `inputs` a subclass spells."""

    task: ClassVar[Task]
    auto: ClassVar[str]
    """The class of transformers that builds this kind."""
    words: ClassVar[str]

    def __init__(self, lm: nn.Module):
        super().__init__()
        self.lm = lm
        self.apart = self._is_head_apart()
        self.check_sight()

    def inputs(self, *given: Tensor | None) -> dict[str, Any]:
        raise NotImplementedError

    def probe(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """What to call the model with, when tokens (b, t) are what it predicts from."""
        return (tokens,)

    def check_sight(self) -> None:
        """Raises RefusedError where tokens see what the task forbids, or not what it is about."""
        raise NotImplementedError

    @property
    def head(self) -> nn.Module | None:
        """Looked up each time, so that it is whatever stands in the head's place now."""
        return self.lm.get_output_embeddings() if self.apart else None

    @property
    def vocabulary(self) -> int:
        return self.lm.get_input_embeddings().weight.shape[0]

    def forward(self, *given: Tensor | None) -> Tensor:
        if self.apart:
            return self.lm.base_model(**self.inputs(*given)).last_hidden_state
        return self.logits(*given)

    def logits(self, *given: Tensor | None) -> Tensor:
        return self.lm(**self.inputs(*given)).logits

    def sees_later(self) -> bool:
        """Whether a change of the last token changes what is said at earlier ones."""
        tokens = self._tokens()
        changed = tokens.clone()
        changed[0, -1] = tokens[0, 0]
        with eval_mode(self.lm), torch.no_grad():
            before, after = (self.logits(*self.probe(ids)) for ids in (tokens, changed))
        moved = (after - before).abs().amax(-1)[0]
        return bool(moved[:-1].max() > 1e-4 * moved[-1])

    def _tokens(self) -> Tensor:
        embedding = self.lm.get_input_embeddings().weight
        return (torch.arange(8, device=embedding.device) % embedding.shape[0])[None]

    def _is_head_apart(self) -> bool:
        """Whether logits are exactly head(last hidden state).

        The head's output is enlarged a thousandfold on the way: a small random model's logits are so near zero that a
        soft cap would not show otherwise.
        """
        lm, head = self.lm, self.lm.get_output_embeddings()
        if head is None or lm.base_model is lm:
            return False
        seen: list[Tensor] = []

        def enlarge(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            seen.extend((inputs[0], output * 1000))
            return output * 1000

        inputs = self.inputs(*self.probe(self._tokens()))
        hook = head.register_forward_hook(enlarge)
        try:
            with eval_mode(lm), torch.no_grad():
                logits = lm(**inputs).logits
                hidden = getattr(lm.base_model(**inputs), "last_hidden_state", None)
        finally:
            hook.remove()
        if len(seen) != 2 or hidden is None or hidden.shape != seen[0].shape:
            return False
        return torch.allclose(hidden, seen[0], rtol=1e-5, atol=1e-6) and torch.allclose(
            logits, seen[1].to(logits.dtype)
        )


class HuggingFaceCausalLM(HuggingFaceModel):
    """`model(tokens)`, or `model(tokens, segments)` for texts that share a row, see `Transformer`. Raises RefusedError
    for a model in which a token can see later ones: it would learn to copy what it should predict; and for segments
    given to one that does not tell texts apart by positions that start again."""

    task, auto, words = "next_token", "AutoModelForCausalLM", "causal language model"

    def inputs(self, tokens: Tensor, segments: Tensor | None = None) -> dict[str, Any]:
        inputs = {"input_ids": tokens, "use_cache": False}
        if segments is None:
            return inputs
        if not self.keeps_apart:
            raise RefusedError(
                f"{type(self.lm).__name__} does not tell apart texts that share a row",
                fix="--set objective.packed=false for conversations, --set data.separate=false for documents",
            )
        return inputs | {"position_ids": segment_positions(segments)}

    @cached_property
    def keeps_apart(self) -> bool:
        """True if texts packed into one row do not influence later texts, up to rounding: experts process the tokens
        of all texts together."""
        tokens = self._tokens()
        changed = tokens.clone()
        changed[0, 0] = tokens[0, -1]
        positions = torch.arange(8, device=tokens.device)[None] % 4
        try:
            with eval_mode(self.lm), torch.no_grad():
                before, after = (
                    self.lm(ids, position_ids=positions, use_cache=False).logits for ids in (tokens, changed)
                )
        except TypeError:  # an architecture that takes no positions
            return False
        moved = (after - before).abs().amax(-1)[0]
        return bool(moved[4:].max() <= 1e-4 * moved[:4].max())

    def check_sight(self) -> None:
        _ = self.keeps_apart  # found out now, with real values
        if self.sees_later():
            raise RefusedError(
                f"{type(self.lm).__name__} lets a token see later ones: it is not a causal language model",
                fix="for an encoder such as BERT, set is_decoder to true in config.json or choose another model",
            )


class HuggingFaceMaskedLM(HuggingFaceModel):
    """`model(tokens, keep)`, `keep` (b, t) False where there is only padding. Raises RefusedError for a model in which
    no token sees later ones: it could not use what follows a masked one."""

    task, auto, words = "masked_token", "AutoModelForMaskedLM", "masked language model"

    def inputs(self, tokens: Tensor, keep: Tensor | None = None) -> dict[str, Any]:
        return {"input_ids": tokens} | ({} if keep is None else {"attention_mask": keep.long()})

    def check_sight(self) -> None:
        if not self.sees_later():
            raise RefusedError(
                f"{type(self.lm).__name__} lets no token see later ones: it cannot fill in masked tokens",
                fix="choose an encoder, or set is_decoder to false in config.json",
            )


class HuggingFaceTextClassifier(HuggingFaceModel):
    """`model(tokens, keep, types)`: logits (b, c). `keep` (b, t) is False where there is only padding, `types` (b, t)
    is 1 for the second text of a pair, which models without types of tokens are not given."""

    task, auto, words = "text_classification", "AutoModelForSequenceClassification", "classifier of texts"

    def inputs(self, tokens: Tensor, keep: Tensor | None = None, types: Tensor | None = None) -> dict[str, Any]:
        return classifier_inputs(self.lm, tokens, keep, types)

    def check_sight(self) -> None:
        """Nothing is forbidden: the label is not among the tokens."""


class HuggingFaceTokenClassifier(HuggingFaceTextClassifier):
    """The same for labels of words: logits (b, t, c)."""

    task, auto, words = "token_classification", "AutoModelForTokenClassification", "classifier of words"


class HuggingFaceSeq2Seq(HuggingFaceModel):
    """`model(source, tokens, keep)`, `keep` (b, s) False where the source is only padding. Raises RefusedError for a
    model in which a token of the target can see later ones."""

    task, auto, words = "sequence_to_sequence", "AutoModelForSeq2SeqLM", "sequence-to-sequence model"

    def inputs(
        self, source: Tensor, tokens: Tensor, keep: Tensor | None = None, positions: Tensor | None = None
    ) -> dict[str, Any]:
        if positions is not None:
            raise RefusedError(
                f"{type(self.lm).__name__} cannot be told where in a text its target stands",
                fix="take a model of ours: model.preset = marian-nano or t5-nano, or a folder of their families",
            )
        inputs = {"input_ids": source, "decoder_input_ids": tokens, "use_cache": False}
        return inputs | ({} if keep is None else {"attention_mask": keep.long()})

    def probe(self, tokens: Tensor) -> tuple[Tensor, ...]:
        return self._tokens(), tokens

    def check_sight(self) -> None:
        if self.sees_later():
            raise RefusedError(
                f"{type(self.lm).__name__} lets a token of the target see later ones",
                fix="choose another model: this one would learn to copy what it should predict",
            )
