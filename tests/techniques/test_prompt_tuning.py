"""Prompt tuning against its paper and against peft."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from adapter_models import CONFIGS, LENGTH, TOKENS, next_token_loss, ours, theirs
from drawn_models import OddDecoder
from own_gpt import Block
from tiny_runs import advance, plain_run, technique, tiny_model
from torch import Tensor, nn

import thrifty
from thrifty.composition.compose import compose
from thrifty.core.errors import RefusedError, UsageError
from thrifty.models.hf_wrapper import HuggingFaceCausalLM
from thrifty.models.text_generation import generate
from thrifty.techniques.adapters.prompt_tuning import PromptTuning, embed, initial_prompt, lengthen
from thrifty.techniques.memory.recompute import Recompute

COUNT = 5


def peft_model(model: Any, task: str = "CAUSAL_LM", **settings: Any) -> Any:
    return peft.get_peft_model(
        model, peft.PromptTuningConfig(task_type=task, num_virtual_tokens=COUNT, **settings)
    ).eval()


def set_prompt(model: nn.Module, values: torch.Tensor) -> nn.Parameter:
    (actual,) = (p for name, p in model.named_parameters() if name.endswith("prompt"))
    with torch.no_grad():
        actual.copy_(values)
    return actual


def test_negative_tokens_are_rows_of_the_prompt() -> None:
    longer = lengthen(torch.tensor([[7, 8], [9, 9]]), 3)
    assert longer.tolist() == [[-1, -2, -3, 7, 8], [-1, -2, -3, 9, 9]]
    prompt, words = torch.randn(3, 4), torch.randn(2, 5, 4)
    actual = embed(longer, words, prompt)
    assert torch.equal(actual[:, :3], prompt.expand(2, -1, -1)) and torch.equal(actual[:, 3:], words[:, 3:])


def test_initialization_from_embedding_rows_or_uniform() -> None:
    table, generator = torch.randn(40, 8), torch.Generator().manual_seed(0)
    words = initial_prompt(table, 12, "words", generator)
    rows = [next(i for i, row in enumerate(table) if torch.equal(row, word)) for word in words]
    assert len(set(rows)) == 12
    assert initial_prompt(table, 100, "words", generator).shape == (100, 8)
    drawn = initial_prompt(table, 100, "random", generator)
    assert drawn.abs().max() <= 0.5 and drawn.std() > 0.25


@pytest.mark.parametrize("kind", CONFIGS)
def test_outputs_and_gradients_equal_peft(kind: str, tmp_path: Path) -> None:
    expected_model = peft_model(theirs(kind))
    wanted_prompt = expected_model.prompt_encoder["default"].embedding.weight
    expected = expected_model(input_ids=TOKENS).logits[:, COUNT:]
    next_token_loss(expected, TOKENS).backward()
    for model in (theirs(kind), HuggingFaceCausalLM(theirs(kind)), ours(kind, tmp_path)):
        prompt = set_prompt(PromptTuning(tokens=COUNT).model(model).eval(), wanted_prompt)
        actual = model(input_ids=TOKENS).logits if not hasattr(model, "task") else model.logits(TOKENS)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        next_token_loss(actual, TOKENS).backward()
        torch.testing.assert_close(prompt.grad, wanted_prompt.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", CONFIGS)
def test_masks_and_labels_include_virtual_tokens_as_in_peft(kind: str) -> None:
    keep = torch.ones_like(TOKENS)
    keep[0, :4] = 0
    labels = TOKENS.masked_fill(keep == 0, -100)
    labels[:, 0] = -100  # peft's last virtual token predicts the first real one; here nothing does, as without a prompt
    expected_model = peft_model(theirs(kind))
    model = PromptTuning(tokens=COUNT).model(theirs(kind))
    set_prompt(model, expected_model.prompt_encoder["default"].embedding.weight)
    expected = expected_model(input_ids=TOKENS, attention_mask=keep, labels=labels)
    actual = model(input_ids=TOKENS, attention_mask=keep, labels=labels)
    torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-5, atol=1e-6)
    positions = torch.arange(TOKENS.shape[1]).expand(2, -1)
    again = model(input_ids=TOKENS, attention_mask=keep, labels=labels, position_ids=positions)
    torch.testing.assert_close(again.loss, expected.loss, rtol=1e-5, atol=1e-6)


def test_the_encoder_of_an_encoder_decoder_equals_peft() -> None:
    sizes = {"vocab_size": 300, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 2}
    settings: dict[str, Any] = {**sizes, "decoder_start_token_id": 0}
    config = transformers.T5Config(**settings)
    base, other = (transformers.T5ForConditionalGeneration(config).eval() for _ in range(2))
    other.load_state_dict(base.state_dict())
    expected_model = peft_model(other, "SEQ_2_SEQ_LM", num_transformer_submodules=1)
    keep = torch.ones_like(TOKENS)
    keep[1, 8:] = 0
    inputs = {"input_ids": TOKENS, "attention_mask": keep, "decoder_input_ids": TOKENS[:, :5]}
    expected = expected_model(**inputs).logits
    model = PromptTuning(tokens=COUNT).model(base)
    set_prompt(model, expected_model.prompt_encoder["default"].embedding.weight)
    torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("style", ["llama", "gpt"])
def test_only_the_prompt_is_trained_and_outputs_keep_length(style: str) -> None:
    run = compose(plain_run(style=style), [technique("adapters.prompt_tuning"), technique("optimizers.adamw")], 4)
    state = run.start()
    advance(run, state)
    assert state.model is not None and state.optimizer is not None
    assert state.optimizer.names == ["embedding.token.prompt"]
    trained = dict(state.model.named_parameters())
    assert all(torch.equal(trained[name], value) for name, value in plain_run(style=style).build().named_parameters())
    assert state.model(TOKENS % 256).shape == (2, 12, 32)


def test_gradients_are_equal_with_recompute() -> None:
    gradients = []
    for again in (False, True):
        model = PromptTuning(tokens=4).model(tiny_model(depth=2))
        model = Recompute().model(model) if again else model
        next_token_loss(model.logits(TOKENS % 256), TOKENS % 256).backward()
        gradients.append(model.embedding.token.prompt.grad)
    assert gradients[0].any() and torch.equal(*gradients)


def test_text_is_sampled_after_the_prompt() -> None:
    model = PromptTuning(tokens=4).model(tiny_model(depth=2)).eval()
    tokens = generate(model, TOKENS[:1, :3] % 256, 3, greedy=True)
    for length in (3, 4, 5):
        assert tokens[0, length] == model.logits(tokens[:, :length])[0, -1].argmax()


def test_the_prompt_shortens_the_context_length() -> None:
    model = PromptTuning(tokens=4).model(theirs("gpt2"))
    fitting = torch.zeros(1, LENGTH - 4, dtype=torch.long)
    model(input_ids=fitting)
    with pytest.raises(UsageError, match="'4' virtual tokens and '61' text tokens exceed the 64 positions") as refused:
        model(input_ids=torch.cat((fitting, fitting[:, :1]), 1))
    assert "data.length=60" in refused.value.fix


def test_unsupported_inputs_are_refused() -> None:
    with pytest.raises(RefusedError, match="no token embedding"):
        PromptTuning().model(nn.Sequential(nn.ModuleList([nn.Linear(2, 2)])))
    model = PromptTuning(tokens=2).model(theirs("llama"))
    cache = transformers.DynamicCache()
    cache.update(torch.zeros(2, 4, 3, 8), torch.zeros(2, 4, 3, 8), 0)
    with pytest.raises(UsageError, match="cannot continue from a cache"):
        model(input_ids=TOKENS, past_key_values=cache)
    with pytest.raises(UsageError, match="no tokens to precede"):
        model(inputs_embeds=torch.zeros(2, 3, 32))
    with pytest.raises(UsageError, match="attention_mask has shape"):
        model(input_ids=TOKENS, attention_mask=torch.ones(2, 1, 12, 12))


def test_a_prompt_beyond_a_bare_position_table_is_refused() -> None:
    model, tokens = OddDecoder(), torch.randint(64, (2, 12))  # its 12 positions are a parameter
    thrifty.apply(model, "adapters.prompt_tuning", tokens=4)
    with pytest.raises(UsageError, match="'4' virtual tokens and '12' text tokens exceed the 12 positions") as refused:
        model(tokens)
    assert "data.length=8" in refused.value.fix or '"data.length": 8' in refused.value.fix
    assert model(tokens[:, :8]).shape == (2, 8, 64)


def test_packed_rows_are_refused_with_a_fix() -> None:
    model = technique("adapters.prompt_tuning").model(tiny_model(style="gpt"))
    with pytest.raises(UsageError, match="virtual tokens need one text per row") as refused:
        model(torch.zeros(1, 4, dtype=torch.long), torch.tensor([[1, 1, 2, 2]]))
    assert refused.value.fix == "--set objective.packed=false"


@pytest.mark.parametrize("return_dict", [True, False])
def test_a_pooler_reads_the_first_real_token(return_dict: bool) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=300, **sizes)).eval()
    model = PromptTuning(tokens=COUNT).model(model)
    hidden, pooled = model.bert(TOKENS, return_dict=return_dict)[:2]
    assert hidden.shape == (*TOKENS.shape, 32)
    torch.testing.assert_close(pooled, model.bert.pooler(hidden))


class GPTInModuleDict(nn.Module):
    """GPT whose embeddings and blocks are in a module without a forward method, and whose output is a tuple."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = nn.ModuleList(Block(16, 2) for _ in range(2))
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(300, 16), "wpe": nn.Embedding(32, 16), "h": blocks})
        self.lm_head = nn.Linear(16, 300)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, None]:
        x = self.transformer["wte"](idx) + self.transformer["wpe"](torch.arange(idx.shape[1]))
        for block in self.transformer["h"]:
            x = block(x)
        return self.lm_head(x), None


def test_a_prompt_precedes_the_tokens_of_a_module_dict() -> None:
    plain, model = GPTInModuleDict(), PromptTuning(tokens=COUNT).model(GPTInModuleDict())
    words = set_prompt(model, plain.transformer["wte"].weight[:COUNT])
    logits, _ = model(TOKENS)
    longer = torch.cat((torch.arange(COUNT).expand(2, -1), TOKENS), 1)  # the same vectors as real tokens
    torch.testing.assert_close(logits, plain(longer)[0][:, COUNT:])
    logits.sum().backward()
    assert words.grad is not None and words.grad.any()


class Scorer(GPTInModuleDict):
    """A model that returns scores (b, t) of tokens, or logits (b, c) of as many classes as there are virtual and real
    tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lm_head = nn.Linear(16, width)

    def forward(self, idx: Tensor) -> Tensor:  # type: ignore[override]
        output = super().forward(idx)[0]
        return output.squeeze(-1) if output.shape[-1] == 1 else output[:, -1]


@pytest.mark.parametrize(("width", "columns"), [(1, TOKENS.shape[1]), (COUNT + TOKENS.shape[1],) * 2])
def test_scores_of_tokens_are_cut_and_logits_of_classes_not(width: int, columns: int) -> None:
    assert PromptTuning(tokens=COUNT).model(Scorer(width))(TOKENS).shape == (2, columns)


def test_outputs_in_tuples_keep_their_length() -> None:
    model = PromptTuning(tokens=COUNT).model(theirs("gpt2"))
    assert model.transformer(TOKENS, return_dict=False)[0].shape == (*TOKENS.shape, 32)
