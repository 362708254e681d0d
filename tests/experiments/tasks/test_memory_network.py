"""Memory network, compared with its formulas in plain loops."""

import math
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from thrifty.core.errors import UsageError
from thrifty.experiments.tasks.memory_network import MemoryNetwork, position_encoding, position_sums, recency

STORY = [[3, 5, 1], [2, 4], [], [6, 1, 2], [4, 3]]
"""Words of four sentences, one of which is empty, and of a question."""


def story_tensor() -> Tensor:
    rows = [[*words, *[0] * (3 - len(words))] for words in STORY]
    return torch.tensor([rows, rows[::-1]])[:1]


def reference_embedding(words: list[int], table: Tensor) -> Tensor:
    total, width = torch.zeros(table.shape[1], dtype=table.dtype), table.shape[1]
    for j, word in enumerate(words, 1):
        for k in range(1, width + 1):
            factor = (1 - j / len(words)) - (k / width) * (1 - 2 * j / len(words))
            total[k - 1] += factor * table[word, k - 1]
    return total


def reference_answer(model: MemoryNetwork) -> Tensor:
    *sentences, question = STORY
    there = [words for words in sentences if words]
    adjacent = model.tying == "adjacent"
    state = reference_embedding(question, model.words[0] if adjacent else model.question)
    for hop in range(model.hops):
        first, second = (hop, hop + 1) if adjacent else (0, 1)
        keys, values = (
            [reference_embedding(words, model.words[i]) + model.times[i][len(there) - 1 - at]
             for at, words in enumerate(there)]
            for i in (first, second)
        )  # fmt: skip
        powers = [math.exp(float(state @ key)) for key in keys]
        retrieved = sum(power / sum(powers) * value for power, value in zip(powers, values, strict=True))
        state = retrieved + (state if adjacent else model.between @ state)
    return (model.words[-1] if adjacent else model.answer) @ state


@pytest.mark.parametrize("tying", ["adjacent", "layer_wise"])
@pytest.mark.parametrize("hops", [1, 3])
def test_answers_match_the_formulas(tying: Literal["adjacent", "layer_wise"], hops: int) -> None:
    torch.manual_seed(0)
    model = MemoryNetwork(8, 4, width=5, hops=hops, tying=tying).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.5)
        found = model(story_tensor())
        torch.testing.assert_close(found[0], reference_answer(model).to(found.dtype), rtol=1e-5, atol=1e-6)
        again = model(torch.cat((story_tensor(), torch.zeros(1, 5, 3, dtype=torch.int64)), 1)[:, [0, 5, 1, 6, 2, 3, 4]])
        torch.testing.assert_close(again, found)  # padding does not count


def test_a_sentence_embedding_is_the_weighted_sum_of_its_words() -> None:
    table = torch.randn(8, 5)
    found = position_encoding(position_sums(story_tensor(), 8), table)
    for row, words in enumerate(STORY):
        torch.testing.assert_close(found[0, row], reference_embedding(words, table))


def test_in_training_recencies_are_skipped_and_keep_their_order() -> None:
    there = torch.tensor([[True, True, False, True]])
    assert recency(there).tolist() == [[2, 1, 1, 0]]
    assert recency(there, torch.tensor([[5, 1, 7, 2]])).tolist() == [[5, 3, 3, 0]]
    model = MemoryNetwork(8, 4, width=5)
    assert model.eval().gaps(there) is None
    drawn = torch.stack([model.train().gaps(there) for _ in range(500)]).float()
    assert 0.05 < float(drawn.mean()) < 0.15


def test_gradients_match_finite_differences() -> None:
    model = MemoryNetwork(8, 4, width=3, hops=2).double().eval()
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).requires_grad_()
    names, shapes = zip(*((name, each.shape) for name, each in model.named_parameters()), strict=True)

    def loss(values: Tensor) -> Tensor:
        parts = values.split([shape.numel() for shape in shapes])
        parameters = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        logits = torch.func.functional_call(model, parameters, (story_tensor(),))
        return F.cross_entropy(logits, torch.tensor([3]))

    assert torch.autograd.gradcheck(loss, (flat,), atol=1e-4, rtol=1e-3, eps=1e-4)


def test_no_hops_are_refused() -> None:
    with pytest.raises(UsageError, match="hops is '0' and sentences is '4'"):
        MemoryNetwork(8, 4, hops=0)
