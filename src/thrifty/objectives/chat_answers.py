"""Instruction tuning (Ouyang et al. 2022): train on the tokens of the answers in conversations.

Paper       Ouyang et al. 2022, InstructGPT (arXiv 2203.02155), section 3.5, the supervised step. Data and settings
            follow Stanford Alpaca (Taori et al. 2023) and Alpaca-LoRA.
Promise     By default every answer token of the effective batch weighs the same. The gradient does not depend on how
            conversations share rows.
Use         own = {"objective.template": "chatml"}
            run = thrifty.train("llama-nano", "chats.jsonl", loss="chat_answers", settings=own, budget="2000 steps")
            print(run.loss)
Start with  `--set objective.name=chat_answers`. Alpaca-LoRA also trains on the questions:
            `objective.trained_on=everything`.
Cost        The same as next-token prediction on the same rows.
Avoid       `objective.packed=true` with a model that cannot keep the conversations of a row apart.
Does not    Learn from preferences or rewards. It does not add a chat template to a tokenizer: set `objective.template`.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.core.errors import UsageError, did_you_mean
from thrifty.core.objective import ChatLearningSettings, Prediction
from thrifty.objectives.token_cross_entropy import TokenCrossEntropy, prediction_of

CHOICES = {"trained_on": ("answers", "everything"), "weigh_by": ("tokens", "conversations")}


@dataclass(frozen=True)
class ChatAnswers(TokenCrossEntropy):
    """Cross-entropy of the answers in conversations.

    Fields    "tokens", "targets", "segments" and "share" (b, t), and "amount" (b,), as in `PackedConversations`. An
              example is a row. It may hold several conversations, which do not attend to each other.

    Weighted by tokens, all answers of the effective batch count like one text. Weighted by conversations, short answers
    count as much as long ones.
    """

    learns_from = ("chats",)

    trained_on: str = "answers"
    """Trained tokens: "answers" or "everything"."""
    weigh_by: str = "tokens"
    """Unit of equal weight: "tokens" or "conversations"."""
    packed: bool = True
    """True to pack as many conversations into a row as fit. False pads one conversation per row, for models without a
    mask between segments."""
    template: str = ""
    """Chat template: "chatml", "alpaca" or a Jinja file. If empty, the tokenizer's own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise UsageError(
                    f"objective.{name} is {getattr(self, name)!r}", fix=did_you_mean(getattr(self, name), choices)
                )

    def chat_learning(self) -> ChatLearningSettings:
        return ChatLearningSettings(
            everything=self.trained_on == "everything",
            by_tokens=self.weigh_by == "tokens",
            together=self.packed,
            template=self.template,
        )

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        context = (batch["segments"],) if self.packed else ()
        return prediction_of(model, model(batch["tokens"], *context))

    def targets(self, batch: Batch) -> Tensor:
        return batch["targets"]

    def shares(self, batch: Batch) -> Tensor:
        return batch["share"]

    def tokens(self, batch: Batch) -> int:
        return int((batch["segments"] > 0).sum())
