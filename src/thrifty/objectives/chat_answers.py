"""Instruction tuning (Ouyang et al. 2022): train on the answers in conversations.

Paper       Ouyang et al. 2022, InstructGPT (arXiv 2203.02155), section 3.5, supervised fine-tuning. Data and settings
            follow Stanford Alpaca (Taori et al. 2023) and Alpaca-LoRA.
Promise     By default every answer token of the effective batch has the same weight. The gradient does not depend on
            how conversations are packed into rows.
Use         own = {"objective.template": "chatml"}
            run = thrifty.train("llama-nano", "chats.jsonl", loss="chat_answers", settings=own, budget="2000 steps")
            print(run.loss)
Start with  `--set objective.name=chat_answers`. Set `objective.trained_on=everything` to train on questions too, as
            Alpaca-LoRA does.
Cost        The same as next-token prediction on the same rows.
Avoid       `objective.packed=true` with a model that cannot mask attention between conversations of a row. A tokenizer
            without a chat template, unless `objective.template` is set.
Does not    Learn from preferences or rewards.
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
              example is a row of one or more conversations. Conversations of a row do not attend to each other.

    With `weigh_by="tokens"` each answer token has the same weight; with "conversations", each conversation has the same
    weight.
    """

    learns_from = ("chats",)

    trained_on: str = "answers"
    """Tokens with a loss: "answers" or "everything"."""
    weigh_by: str = "tokens"
    """Objects of equal weight: answer tokens ("tokens") or conversations ("conversations")."""
    packed: bool = True
    """True to pack several conversations into each row. False pads one conversation per row, for models that cannot
    mask attention between conversations."""
    template: str = ""
    """Chat template: "chatml", "alpaca" or a Jinja file. Empty for the template of the tokenizer."""

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
