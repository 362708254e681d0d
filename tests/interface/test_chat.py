"""Conversations with a model: room for the answer and memory of earlier turns."""

from typing import Any

import pytest
import torch
from chat_runs import small_tokenizer

from thrifty.interface.chat import ChatSession

Calls = list[tuple[list[int], int]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Prompts and maximum lengths of answers. Each answer is one token."""
    made: Calls = []

    def generate(model: Any, tokens: torch.Tensor, count: int, **options: Any) -> torch.Tensor:
        made.append((tokens[0].tolist(), count))
        return torch.cat((tokens, torch.tensor([[65]])), dim=1)

    monkeypatch.setattr("thrifty.interface.chat.generate", generate)
    return made


def session(context: int | None, printed: list[str]) -> ChatSession:
    model = torch.nn.Linear(1, 1)
    return ChatSession("run", model, small_tokenizer(), context, 256, 0.0, None, 0, say=printed.append)


def test_a_chat_keeps_earlier_turns_and_shortens_answers(calls: Calls) -> None:
    printed: list[str] = []
    conversation = session(100, printed)
    for _ in range(12):
        conversation.ask("a")
    (first, _), (second, _) = calls[:2]
    assert second[: len(first)] == first and len(second) > len(first)
    assert all(len(prompt) + count == 100 and count >= 50 for prompt, count in calls)
    assert "oldest 2 messages are left out, because the context has 100 tokens" in printed[0]
    assert len(conversation.messages) == 24  # what is left out of a prompt stays in the record


def test_a_question_longer_than_the_context_has_an_answer(calls: Calls) -> None:
    session(20, []).ask("a question that is much longer than twenty tokens " * 9)
    session(None, []).ask("a")
    assert [count for _, count in calls] == [10, 256]
