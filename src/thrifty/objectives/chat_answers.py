"""Chat answers: the cross-entropy of each token of the answers in conversations (instruction tuning).

Paper     Ouyang et al. 2022, Training language models to follow instructions with human feedback (arXiv 2203.02155),
          section 3.5, its first step; data and settings after Stanford Alpaca (Taori et al. 2023) and Alpaca-LoRA.
Fields    "tokens" and "targets" (b, t), "segments" (b, t), "share" (b, t) and "amount" (b,) as `PackedConversations`
          has them. An example is a row, which may hold several conversations that see nothing of each other.
Note      Stanford Alpaca learns answers only, Alpaca-LoRA also the questions: `trained_on`. By default every token of
          the effective batch counts alike, as if all its answers were one text: the gradient then does not depend on
          how conversations were put together into rows. By conversations, short answers count as much as long ones.
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
    """Answers of conversations, each token from the question and what was said before it."""

    learns_from = ("chats",)

    trained_on: str = "answers"
    """"answers", or "everything"."""
    weigh_by: str = "tokens"
    """What counts alike: "tokens" or "conversations"."""
    packed: bool = True
    """As many conversations to a row as fit; otherwise one, filled up, for models that cannot tell texts in a row
    apart."""
    template: str = ""
    """The chat template: "chatml", "alpaca" or a Jinja file; empty takes the tokenizer's own."""

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
