"""Prompt tuning (Lester et al. 2021): prepend trained embedding vectors to the input tokens.

Paper       Lester, Al-Rfou and Constant 2021, The Power of Scale for Parameter-Efficient Prompt Tuning (arXiv
            2104.08691), section 2.
Promise     A frozen model of width d learns k · d values, for k virtual tokens.
Use         model = thrifty.apply(model, "prompt_tuning", tokens=20)
            optimizer = thrifty.optim.Adafactor(model, lr=0.3)
Start with  `prompt_tuning:tokens=20` and a large constant learning rate; the paper uses 0.3 with Adafactor.
Cost        Every sequence is k tokens longer inside the model. The backward pass runs through all frozen blocks.
Avoid       Small models, because in the paper quality reaches full fine-tuning only at billions of parameters.
Does not    Change the length of the output, because hidden states of virtual tokens are removed before the head and the
            loss.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thrifty.core.errors import RefusedError, UsageError, class_name
from thrifty.core.randomness import keyed_generator
from thrifty.core.run_notes import add_note
from thrifty.core.setting_bounds import Positive
from thrifty.modeling.adapter_base import AdapterTechnique, names_ending, train_only
from thrifty.modeling.embeddings import output_layers, stack_after, token_tables
from thrifty.modeling.layer_shapes import out_width
from thrifty.modeling.module_surgery import change_first, find_stacks, wrap_forward
from thrifty.techniques.adapters._virtual_tokens import (
    common_path,
    extend_masks,
    input_names,
    named_inputs,
    position_limit,
    refuse_beyond,
)

Initialization = Literal["words", "random"]


def lengthen(tokens: Tensor, count: int) -> Tensor:
    """Prepend `count` virtual tokens to tokens (b, t), and return (b, count + t).

    Virtual tokens are negative: -1 selects row 0 of the prompt, -2 selects row 1, …
    """
    virtual = -1 - torch.arange(count, device=tokens.device, dtype=tokens.dtype)
    return torch.cat((virtual.expand(len(tokens), -1), tokens), 1)


def embed(tokens: Tensor, words: Tensor, prompt: Tensor) -> Tensor:
    """Return the embeddings (b, t, d) of tokens. Virtual tokens get rows of the prompt (k, d), real tokens get `words`.

    `words` (b, t, d) are the model's own embeddings.
    """
    rows = F.embedding((-1 - tokens).clamp(min=0), prompt)
    return torch.where((tokens < 0)[..., None], rows.to(words.dtype), words)


@torch.no_grad()
def initial_prompt(table: Tensor, count: int, initialization: Initialization, generator: torch.Generator) -> Tensor:
    """Return an initial prompt (k, d) of k = `count` vectors.

    With "words" the vectors are random rows of the table, without repetition if possible. With "random" they are
    uniform in ±0.5.
    """
    if initialization == "random":
        return table.new_empty(count, table.shape[1]).uniform_(-0.5, 0.5, generator=generator)
    rows = torch.randperm(len(table), generator=generator, device=table.device)
    return table[rows.repeat(-(-count // len(rows)))[:count]].clone()


def add_prompt(model: nn.Module, values: Tensor) -> nn.Parameter:
    """Prepend a prompt (k, d) to every sequence of a model. Return the prompt, a parameter of the embedding."""
    tables, stacks = feeding_tables(model), find_stacks(model)
    prompt = nn.Parameter(values)
    for table in tables.values():
        table.prompt = prompt
        wrap_forward(table, _embed_with_prompt)
    path = _caller_of(model, common_path([*tables, *stacks]))
    body = model.get_submodule(path)
    body.tokens_name = input_names(body)[0]
    body.virtual_tokens, body.position_limit = len(values), position_limit(model)
    body.is_output_cut, body.classes = len(stacks) == 1, {out_width(layer) for layer in output_layers(body).values()}
    wrap_forward(body, _read_with_prompt)
    if body.is_output_cut and getattr(body, "pooler", None) is not None:
        # the pooler reads the first token
        inside = next(iter(stacks)).removeprefix(f"{path}.").partition(".")[0]
        encoder = body.get_submodule(inside)
        encoder.virtual_tokens = len(values)
        wrap_forward(encoder, _encode_with_prompt)
    add_note(f"{len(values)} virtual tokens before the input of {path or 'the model'}")
    return prompt


def _caller_of(model: nn.Module, path: str) -> str:
    """Return the name of the innermost module that contains a module and calls it. `nn.ModuleDict` and the like have no
    forward method."""
    while path and type(model.get_submodule(path)).forward is nn.Module.forward:
        path = path.rpartition(".")[0]
    return path


def feeding_tables(model: nn.Module) -> dict[str, nn.Embedding]:
    """Return the token embedding before the first stack of blocks, and all modules with the same weight, by name."""
    tables, stacks = token_tables(model), find_stacks(model)
    first = next((t for name, t in tables.items() if stack_after(name, stacks) == next(iter(stacks))), None)
    if first is None:
        raise RefusedError(
            f"{class_name(model)} has no token embedding to add a prompt to",
            fix="--with adapters.visual_prompt, which adds prompts in the blocks",
        )
    return {name: table for name, table in tables.items() if table.weight is first.weight}


def _embed_with_prompt(table: nn.Module, inner: Any, tokens: Tensor) -> Tensor:
    return embed(tokens, inner(tokens.clamp(min=0)), table.prompt)


def _read_with_prompt(body: nn.Module, inner: Any, *args: Any, **kwargs: Any) -> Any:
    inputs = named_inputs(body, args, kwargs)
    if inputs.get(body.tokens_name) is None:
        what = f"{body.tokens_name!r} is missing, so the prompt has no tokens to precede"
        raise UsageError(what, fix=f"pass the tokens as {body.tokens_name}")
    length = inputs[body.tokens_name].shape[1]
    refuse_beyond(body.position_limit, body.virtual_tokens, length)
    output = inner(**_lengthen_inputs(inputs, body.tokens_name, body.virtual_tokens))
    total = body.virtual_tokens + length
    return _cut(output, body.virtual_tokens, total, total in body.classes) if body.is_output_cut else output


def _encode_with_prompt(encoder: nn.Module, inner: Any, *args: Any, **kwargs: Any) -> Any:
    hidden = next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
    return _cut(inner(*args, **kwargs), encoder.virtual_tokens, hidden.shape[1])


def _lengthen_inputs(inputs: dict[str, Any], first: str, count: int) -> dict[str, Any]:
    extended = inputs | extend_masks(inputs, count) | {first: lengthen(inputs[first], count)}
    if (positions := inputs.get("position_ids")) is not None:
        virtual = torch.arange(count, device=positions.device).expand(len(positions), -1)
        extended["position_ids"] = torch.cat((virtual, positions + count), 1)
    if (types := inputs.get("token_type_ids")) is not None:
        extended["token_type_ids"] = F.pad(types, (count, 0))
    return extended


def _cut(output: Any, count: int, total: int, has_classes: bool = False) -> Any:
    """Remove the outputs of `count` virtual tokens from an output of `total` tokens: a tensor (b, total, d) or
    (b, total), the first element of a tuple, or the fields of a model output. With `has_classes`, tensors (b, total)
    are logits of as many classes."""

    def without(values: Any) -> Any:
        is_whole = isinstance(values, Tensor) and values.ndim > 1 + has_classes and values.shape[1] == total
        return values[:, count:] if is_whole else values

    for name in ("last_hidden_state", "logits"):
        if getattr(output, name, None) is not None:
            output[name] = without(output[name])
    return change_first(output, without)


class PromptTuning(AdapterTechnique):
    """Virtual tokens take the first k positions and real tokens the following positions. So k plus the text length must
    fit the context length. Each row of a batch has one prompt; rows with several texts are refused if the batch has
    segment ids. In an encoder-decoder the encoder receives the prompt. The pooler of an encoder such as BERT reads the
    first real token; in peft it reads the first virtual token.
    """

    tokens: Positive = 20
    """Number of virtual tokens, k."""
    initialization: Initialization = "words"
    """Initial values: random rows of the embedding table ("words"), or uniform in ±0.5 ("random")."""
    seed: int = 0
    """Seed of the initial values."""

    def model(self, model: nn.Module) -> nn.Module:
        table = next(iter(feeding_tables(model).values())).weight
        values = initial_prompt(
            table.detach(), self.tokens, self.initialization, keyed_generator(f"{self.seed}/prompt", table)
        )
        add_prompt(model, values)
        train_only(model, names_ending(model, "prompt"))
        return model

    def finish(self, model: nn.Module) -> nn.Module:
        raise self.refuse_plain("virtual tokens")
