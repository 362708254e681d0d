"""Wrappers of models of `transformers` with the interface of Thrifty's models. Parameter names have the prefix `lm.`.

Usually a model returns hidden states (b, t, d), and `model.head(hidden)` returns logits (b, t, v). Some architectures
have more than one module between hidden state and logits (a soft cap, a scale, a projection). For such architectures
**`head` is None and the model returns logits (b, t, v)**; a chunked loss is then not possible. The wrapper tests both
the head and the attention mask when the model is wrapped.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thrifty.core.classifier_inputs import classifier_inputs
from thrifty.core.errors import RefusedError
from thrifty.core.eval_mode import eval_mode
from thrifty.models.transformer import Task, segment_positions

POSITIONS: ContextVar[tuple[Tensor, int] | None] = ContextVar("positions", default=None)
"""Positions (b, t) of the current target, and the length of the source."""


class HuggingFaceModel(nn.Module):
    """Base class of the wrappers. `lm` is the model of transformers; a subclass defines its `inputs`."""

    wraps_model_in: ClassVar[str] = "lm"
    task: ClassVar[Task]
    auto: ClassVar[str]
    """Name of the Auto class of transformers that builds the model."""
    words: ClassVar[str]

    def __init__(self, lm: nn.Module):
        super().__init__()
        self.lm = lm
        self.has_separate_head = self._is_head_separate()
        self.check_visibility()

    def inputs(self, *tensors: Tensor | None) -> dict[str, Any]:
        raise NotImplementedError

    def probe(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Return the arguments for a test call of the model on tokens (b, t), in which it predicts at these tokens."""
        return (tokens,)

    def check_visibility(self) -> None:
        """Raise RefusedError if a token attends to tokens that the task forbids, or does not attend to required
        tokens."""
        raise NotImplementedError

    @property
    def head(self) -> nn.Module | None:
        """The current head; None if it is not separate. It is looked up each time, because the head may be replaced."""
        return self.lm.get_output_embeddings() if self.has_separate_head else None

    @property
    def vocabulary(self) -> int:
        return self.lm.get_input_embeddings().weight.shape[0]

    def forward(self, *tensors: Tensor | None) -> Tensor:
        if self.has_separate_head:
            return self.lm.base_model(**self.inputs(*tensors)).last_hidden_state
        return self.logits(*tensors)

    def logits(self, *tensors: Tensor | None) -> Tensor:
        return self.lm(**self.inputs(*tensors)).logits

    def attends_to_later(self) -> bool:
        """Return True if a change of the last token changes predictions at earlier tokens."""
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

    def _is_head_separate(self) -> bool:
        """Return True if the logits are exactly head(last hidden state). The check multiplies the head's output by
        1000, because near zero a soft cap changes nothing."""
        lm, head = self.lm, self.lm.get_output_embeddings()
        if head is None or lm.base_model is lm:
            return False
        calls: list[Tensor] = []

        def enlarge(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            calls.extend((inputs[0], output * 1000))
            return output * 1000

        inputs = self.inputs(*self.probe(self._tokens()))
        hook = head.register_forward_hook(enlarge)
        try:
            with eval_mode(lm), torch.no_grad():
                logits = lm(**inputs).logits
                hidden = getattr(lm.base_model(**inputs), "last_hidden_state", None)
        finally:
            hook.remove()
        if len(calls) != 2 or hidden is None or hidden.shape != calls[0].shape:
            return False
        return torch.allclose(hidden, calls[0], rtol=1e-5, atol=1e-6) and torch.allclose(
            logits, calls[1].to(logits.dtype)
        )


class HuggingFaceCausalLM(HuggingFaceModel):
    """Causal language model: `model(tokens)`, or `model(tokens, segments)` for packed texts, see `Transformer`. Raise
    RefusedError for a model whose tokens attend to later tokens, because it would learn to copy its target. Also raise
    RefusedError for `segments` if the model does not separate texts by restarting positions."""

    task, auto, words = "next_token", "AutoModelForCausalLM", "causal language model"

    def inputs(self, tokens: Tensor, segments: Tensor | None = None) -> dict[str, Any]:
        inputs = {"input_ids": tokens, "use_cache": False}
        if segments is None:
            return inputs
        if not self.isolates_texts:
            raise RefusedError(
                f"{type(self.lm).__name__} does not separate texts that are packed into one row",
                fix="for conversations, --set objective.packed=false; or for documents, --set data.separate=false",
            )
        return inputs | {"position_ids": segment_positions(segments)}

    @cached_property
    def isolates_texts(self) -> bool:
        """True if packed texts do not influence later texts, up to rounding. Rounding may differ because the experts of
        a mixture of experts process the tokens of all texts together."""
        tokens = self._tokens()
        changed = tokens.clone()
        changed[0, 0] = tokens[0, -1]
        positions = torch.arange(8, device=tokens.device)[None] % 4
        try:
            with eval_mode(self.lm), torch.no_grad():
                before, after = (
                    self.lm(ids, position_ids=positions, use_cache=False).logits for ids in (tokens, changed)
                )
        except TypeError:  # an architecture without position_ids
            return False
        moved = (after - before).abs().amax(-1)[0]
        return bool(moved[4:].max() <= 1e-4 * moved[:4].max())

    def check_visibility(self) -> None:
        _ = self.isolates_texts  # measured now, while the values are real
        if self.attends_to_later():
            raise RefusedError(
                f"{type(self.lm).__name__} attends to later tokens, so it is not a causal language model",
                fix="choose another model; or, for an encoder such as BERT, set is_decoder to true in config.json",
            )


class HuggingFaceMaskedLM(HuggingFaceModel):
    """Masked language model: `model(tokens, keep)`. `keep` (b, t) is False on padding. Raise RefusedError for a causal
    model, because it cannot use the tokens after a masked token."""

    task, auto, words = "masked_token", "AutoModelForMaskedLM", "masked language model"

    def inputs(self, tokens: Tensor, keep: Tensor | None = None) -> dict[str, Any]:
        return {"input_ids": tokens} | ({} if keep is None else {"attention_mask": keep.long()})

    def check_visibility(self) -> None:
        if not self.attends_to_later():
            raise RefusedError(
                f"{type(self.lm).__name__} does not attend to later tokens, so it cannot fill in masked tokens",
                fix="choose an encoder; or set is_decoder to false in config.json",
            )


class HuggingFaceTextClassifier(HuggingFaceModel):
    """Text classifier: `model(tokens, keep, types)` returns logits (b, c) for c labels. `keep` (b, t) is False on
    padding. `types` (b, t) is 1 for the second text of a pair. Models without token types do not receive `types`."""

    task, auto, words = "text_classification", "AutoModelForSequenceClassification", "classifier of texts"

    def inputs(self, tokens: Tensor, keep: Tensor | None = None, types: Tensor | None = None) -> dict[str, Any]:
        return classifier_inputs(self.lm, tokens, keep, types)

    def check_visibility(self) -> None:
        """Accept every model, because the label is not among the tokens."""


class HuggingFaceTokenClassifier(HuggingFaceTextClassifier):
    """Token classifier with logits (b, t, c) for c labels."""

    task, auto, words = "token_classification", "AutoModelForTokenClassification", "classifier of words"


class HuggingFaceSeq2Seq(HuggingFaceModel):
    """Encoder-decoder: `model(source, tokens, keep, positions)`. `keep` (b, s) is False on the source's padding.
    `positions` (b, t) are the positions of the target in the source's text, for decoders with a table of positions.
    Raise RefusedError for a model whose target tokens attend to later target tokens."""

    task, auto, words = "sequence_to_sequence", "AutoModelForSeq2SeqLM", "sequence-to-sequence model"

    def __init__(self, lm: nn.Module):
        super().__init__(lm)
        named = lm.get_decoder().named_modules()  # type: ignore[operator]
        tables = [table for name, table in named if isinstance(table, nn.Embedding) and "position" in name]
        for table in tables:
            table.register_forward_hook(_at_own_positions)
        self.has_positions = bool(tables)

    def inputs(
        self, source: Tensor, tokens: Tensor, keep: Tensor | None = None, positions: Tensor | None = None
    ) -> dict[str, Any]:
        inputs = {"input_ids": source, "decoder_input_ids": tokens, "use_cache": False}
        return inputs | ({} if keep is None else {"attention_mask": keep.long()})

    def forward(
        self, source: Tensor, tokens: Tensor, keep: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        with self._placed(source, positions):
            return super().forward(source, tokens, keep)

    def logits(
        self, source: Tensor, tokens: Tensor, keep: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        with self._placed(source, positions):
            return super().logits(source, tokens, keep)

    @contextmanager
    def _placed(self, source: Tensor, positions: Tensor | None) -> Iterator[None]:
        if positions is None:
            yield
            return
        if not self.has_positions:
            raise RefusedError(
                f"{type(self.lm).__name__} has no table of positions, so its target has no positions in a text",
                fix="use a model with absolute positions, such as model.preset = marian-nano, or a folder of BART",
            )
        token = POSITIONS.set((positions, source.shape[1]))
        try:
            yield
        finally:
            POSITIONS.reset(token)

    def probe(self, tokens: Tensor) -> tuple[Tensor, ...]:
        return self._tokens(), tokens

    def check_visibility(self) -> None:
        if self.attends_to_later():
            raise RefusedError(
                f"{type(self.lm).__name__} attends to later tokens of the target",
                fix="choose another model, because this model would learn to copy its target",
            )


def _at_own_positions(table: nn.Module, args: Any, output: Tensor) -> Tensor | None:
    """Return the rows of a decoder's table of positions for the positions of the target, (b, t, d)."""
    if (current := POSITIONS.get()) is None:
        return None
    positions, total = current
    first = [*inspect.signature(type(table).forward).parameters][1]
    shape = torch.Size((1, total))
    inputs = shape if first.endswith("shape") else positions.new_zeros(shape)
    rows = type(table).forward(table, inputs)  # type: ignore[arg-type]
    if not isinstance(rows, Tensor):
        raise RefusedError(
            f"{type(table).__name__} returns more than the rows of positions",
            fix="use a model with absolute positions, such as model.preset = marian-nano, or a folder of BART",
        )
    return F.embedding(positions, rows.reshape(total, -1))
