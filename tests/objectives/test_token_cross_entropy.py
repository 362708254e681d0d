"""Models of a user's own return logits, whatever the names of their modules."""

import torch
import torch.nn.functional as F
from tiny_runs import plain_run
from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.models.text_generation import last_logits
from thrifty.objectives.token_cross_entropy import prediction_of


class LogitsOfHead(nn.Module):
    """A language model whose output layer is called `head`, as in many tutorials. The layer is square, so that a second
    call of it would not fail."""

    def __init__(self, size: int = 16):
        super().__init__()
        self.table, self.head = nn.Embedding(size, size), nn.Linear(size, size)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens))


class SeparateHead(LogitsOfHead):
    has_separate_head = True

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


def test_output_of_a_model_with_a_head_is_logits() -> None:
    tokens, model = torch.randint(16, (3, 8), generator=torch.Generator().manual_seed(0)), LogitsOfHead()
    assert torch.equal(prediction_of(model, model(tokens)).logits, model(tokens))
    assert torch.equal(last_logits(model, tokens), model(tokens)[:, -1])


def test_separate_head_is_applied_to_hidden_states_if_declared() -> None:
    tokens, model = torch.randint(16, (3, 8), generator=torch.Generator().manual_seed(0)), SeparateHead()
    assert torch.equal(prediction_of(model, model(tokens)).logits, model.head(model.table(tokens)))


def test_loss_of_a_model_with_a_head_is_the_cross_entropy() -> None:
    objective, model = plain_run().objective, LogitsOfHead(256)
    tokens = torch.randint(256, (3, 9), generator=torch.Generator().manual_seed(0))
    batch = Batch({"tokens": tokens}, torch.ones(3))
    loss = objective.losses(objective.predict(model, batch), batch)
    logits = model(tokens[:, :-1])
    expected = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)
    torch.testing.assert_close(loss, expected)
