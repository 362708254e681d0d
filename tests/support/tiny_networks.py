"""Networks of other people with random weights, and the thinnest wrappers that make them citizens here."""

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

VOCABULARY = 97


def bert() -> BertForMaskedLM:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    return BertForMaskedLM(config).eval()


class HeadApart(nn.Module):
    """A BERT that returns hidden states, and a separate last linear layer with a bias."""

    has_separate_head = True

    def __init__(self, inner: BertForMaskedLM):
        super().__init__()
        self.inner = inner

    @property
    def head(self) -> nn.Linear:
        return self.inner.cls.predictions.decoder

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner.cls.predictions.transform(self.inner.bert(tokens).last_hidden_state)


class T5(nn.Module):
    """A T5 called as our objective calls a model: source, target so far, which of the source is no padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = T5Config(
            vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0,
        )  # fmt: skip
        self.inner = T5ForConditionalGeneration(config)

    def forward(self, source: Tensor, target: Tensor, keep: Tensor | None) -> Tensor:
        return self.inner(input_ids=source, decoder_input_ids=target, attention_mask=keep)
