"""Teacher forcing on an encoder-decoder, with and without padding."""

import pytest
import torch
from tiny_networks import T5, VOCABULARY
from torch import Tensor, nn
from transformers import T5ForConditionalGeneration

from thrifty.core.batches import Batch
from thrifty.core.errors import UsageError
from thrifty.kernels.chunked_cross_entropy import IGNORED
from thrifty.objectives.sequence_to_sequence import SequenceToSequence

OBJECTIVE = SequenceToSequence()


class HiddenStates(nn.Module):
    """The same T5 with hidden states as output and a separate head."""

    has_separate_head = True

    def __init__(self, inner: T5ForConditionalGeneration):
        super().__init__()
        self.inner = inner

    @property
    def head(self) -> nn.Module:
        return self.inner.lm_head

    def forward(self, source: Tensor, target: Tensor, keep: Tensor | None) -> Tensor:
        seen = self.inner.encoder(input_ids=source, attention_mask=keep).last_hidden_state
        states = self.inner.decoder(input_ids=target, encoder_hidden_states=seen, encoder_attention_mask=keep)
        return states.last_hidden_state * self.inner.model_dim**-0.5  # T5 with tied weights scales before its head


def batch(padded: bool, rows: int = 4) -> Batch:
    generator = torch.Generator().manual_seed(1)
    fields = {
        "source": torch.randint(1, VOCABULARY, (rows, 9), generator=generator),
        "tokens": torch.randint(1, VOCABULARY, (rows, 7), generator=generator),
    }
    if padded:
        lengths = torch.arange(rows)[:, None]
        fields["source_keep"] = torch.arange(9) < 3 + lengths
        fields["counted"] = torch.arange(6) < 1 + lengths
    weight = torch.arange(1.0, rows + 1)
    return Batch(fields, weight / weight.sum())


def models() -> list[nn.Module]:
    network = T5().eval()
    return [network, HiddenStates(network.inner)]


@pytest.mark.parametrize("padded", [False, True])
def test_loss_of_each_example_equals_transformers(padded: bool) -> None:
    rows = batch(padded)
    for model in models():
        losses = OBJECTIVE.losses(OBJECTIVE.predict(model, rows), rows)
        for row in range(len(rows)):
            one = rows.rows(row, row + 1)
            labels = one["tokens"][:, 1:]
            if padded:
                labels = labels.masked_fill(~one["counted"], IGNORED)
            loss = model.inner(
                input_ids=one["source"],
                attention_mask=one.fields.get("source_keep"),
                decoder_input_ids=one["tokens"][:, :-1],
                labels=labels,
            ).loss
            torch.testing.assert_close(losses[row], loss, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("padded", [False, True])
def test_separate_head_trains_like_logits(padded: bool) -> None:
    rows, gradients = batch(padded), []
    for model in models():
        model.zero_grad()
        (OBJECTIVE.losses(OBJECTIVE.predict(model, rows), rows) * rows.weight).sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for one, other in zip(*gradients, strict=True):
        assert (one - other).norm() < 1e-5 * one.norm()


def test_padding_changes_nothing() -> None:
    rows = batch(padded=True)
    counted, keep = rows["counted"], rows["source_keep"]
    tokens, source = rows["tokens"].clone(), rows["source"].clone()
    tokens[:, 1:][~counted] = 5
    source[~keep] = 7
    other = Batch({**rows.fields, "tokens": tokens, "source": source}, rows.weight)
    for model in models():
        found = [OBJECTIVE.losses(OBJECTIVE.predict(model, each), each) for each in (rows, other)]
        torch.testing.assert_close(found[0], found[1])
    assert OBJECTIVE.tokens(rows) == int(keep.sum())


@pytest.mark.parametrize("padded", [False, True])
def test_scores_are_the_norms_of_the_gradient_at_the_logits(padded: bool) -> None:
    rows = batch(padded)
    for model in models():
        prediction = OBJECTIVE.predict(model, rows)
        logits = prediction.logits.detach().double().requires_grad_()
        targets = rows["tokens"][:, 1:]
        each = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        counted = rows.fields.get("counted", torch.ones_like(targets, dtype=torch.bool))
        ((each * counted).sum(1) / (counted.sum(1) if padded else 1)).sum().backward()
        scores = OBJECTIVE.scores(prediction, rows).double()
        torch.testing.assert_close(scores, logits.grad.flatten(1).norm(dim=1), rtol=1e-4, atol=1e-6)
        normalizers = OBJECTIVE.normalizers(prediction, rows).double()
        torch.testing.assert_close(normalizers, logits.detach().logsumexp(-1) * counted, rtol=1e-5, atol=1e-5)


def test_settings_out_of_bounds_are_refused() -> None:
    with pytest.raises(UsageError, match=r"mean_span is 0\.5"):
        SequenceToSequence(mean_span=0.5)
    with pytest.raises(UsageError, match="rate is 1"):
        SequenceToSequence(rate=1.0)
