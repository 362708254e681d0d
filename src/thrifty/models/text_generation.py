"""Text generation, one token at a time.

Thrifty's own Transformer uses a key-value cache, so each step processes only the new token. Any other model recomputes
its context for each token. Both methods generate the same tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thrifty.core.errors import ThriftyError, UsageError
from thrifty.core.eval_mode import eval_mode
from thrifty.core.objective import output_head
from thrifty.models.attention_layers import Attention, RotaryPositions, causal_attention
from thrifty.models.transformer import Transformer
from thrifty.models.transformer_blocks import PostNormBlock, TokenEmbedding, TransformerBlock

Reader = Callable[[Tensor], Tensor]
"""Function that maps all tokens so far (b, t) to the logits (b, v) of the next token. t grows by one from call to call.
"""
COLDEST = 1e-6
"""Lowest temperature; below it, logits divided by the temperature may be infinite."""


@torch.no_grad()
def generate(
    model: nn.Module,
    tokens: Tensor,
    count: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    greedy: bool = False,
    context: int | None = None,
    stop: int | None = None,
    seen: Callable[[Tensor], None] = lambda chosen: None,
) -> Tensor:
    """Generate up to `count` tokens after `tokens` (b, t). Return both, (b, t + count).

    `top_k` samples from the k most likely tokens. `top_p` samples from the smallest set of most likely tokens with
    total probability p. `greedy` selects the most likely token. `context` is an additional limit on the context length
    in tokens. A row that has generated the token `stop` repeats `stop`. Generation ends once all rows have generated
    `stop`. `seen` receives each new token (b,) at once. The model is in eval mode during generation. Raise ThriftyError
    if the first logits are NaN.
    """
    _check(model, tokens, temperature, top_k, top_p)
    generator = torch.Generator(device=tokens.device).manual_seed(seed)
    limit = min(filter(None, (context, context_limit(model))), default=None)
    ended = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    with eval_mode(model), _reader(model, limit) as read:
        for number in range(count):
            logits = read(tokens).float()
            if number == 0 and logits.isnan().any():
                raise ThriftyError("the model's logits are NaN", fix="use an earlier checkpoint; or use another model")
            chosen = logits.argmax(-1) if greedy else sample_token(logits, generator, temperature, top_k, top_p)
            if stop is not None:
                chosen = torch.where(ended, stop, chosen)
                ended |= chosen == stop
            tokens = torch.cat((tokens, chosen[:, None]), dim=1)
            seen(chosen)
            if ended.all():
                break
    return tokens


def sample_token(
    logits: Tensor, generator: torch.Generator, temperature: float, top_k: int | None, top_p: float | None
) -> Tensor:
    """Sample one token per row (b,) from logits (b, v)."""
    logits, order = (logits / temperature).sort(descending=True)
    if top_k is not None:
        logits[:, top_k:] = -torch.inf
    probabilities = logits.softmax(-1)
    if top_p is not None:
        reached = probabilities.cumsum(-1) - probabilities >= top_p  # without the token itself, so that one remains
        probabilities = probabilities.masked_fill(reached, 0.0)
    return order.gather(1, probabilities.multinomial(1, generator=generator)).squeeze(1)


def context_limit(model: nn.Module) -> int | None:
    """Return the maximum sequence length in tokens: the model's number of positions, or the limit in its transformers
    config."""
    for module in model.modules():
        if isinstance(module, TokenEmbedding) and module.position is not None:
            return module.position.num_embeddings
        if isinstance(module, RotaryPositions):
            return len(module.cos)
    config = getattr(getattr(model, "lm", None), "config", None)
    return getattr(config, "max_position_embeddings", None)


def check_task(model: nn.Module) -> None:
    """Raise UsageError for a model that does not predict the next token."""
    task = getattr(model, "task", "next_token")
    if task != "next_token":
        raise UsageError(
            f"a model trained for {task} does not predict the next token, so it cannot continue text",
            fix="thrifty predict RUN, for labels of new texts; or a run of a decoder, such as a GPT or Llama",
        )


def _check(model: nn.Module, tokens: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> None:
    check_task(model)
    if tokens.ndim != 2 or tokens.shape[1] == 0:
        raise UsageError(
            f"there is nothing to continue: tokens have shape {tuple(tokens.shape)}", fix="pass one token or more"
        )
    if not COLDEST <= temperature <= 1 / COLDEST:
        raise UsageError(
            f"temperature is {temperature}, outside {COLDEST} to {1 / COLDEST:g}",
            fix=f"use {COLDEST} to {1 / COLDEST:g}; or sample greedily",
        )
    if top_k is not None and top_k < 1:
        raise UsageError(f"top_k is {top_k}, below 1", fix="use 1 or more")
    if top_p is not None and not 0 < top_p <= 1:
        raise UsageError(f"top_p is {top_p}, not in (0, 1]", fix="use a probability above 0, up to 1")


@contextmanager
def _reader(model: nn.Module, limit: int | None) -> Iterator[Reader]:
    """Yield the reader for a model. If possible, it uses a key-value cache until the context is full."""

    def read_again(tokens: Tensor) -> Tensor:
        return last_logits(model, tokens if limit is None else tokens[:, -limit:])

    if not supports_kv_cache(model):
        yield read_again
        return
    with ExitStack() as cache:
        read_new = cache.enter_context(use_kv_cache(model))

        def read(tokens: Tensor) -> Tensor:
            if limit is None or tokens.shape[1] <= limit:
                return read_new(tokens)
            cache.close()  # from here on the window slides and every position changes
            return read_again(tokens)

        yield read


def last_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the logits (b, v) after the last token, also for a model without a separate head."""
    out, head = model(tokens), output_head(model)
    return getattr(out, "logits", out)[:, -1] if head is None else head(out[:, -1])


def supports_kv_cache(model: nn.Module) -> bool:
    """Return True if all attention cores are the default core, and no module is replaced and no forward is wrapped."""
    if type(model) is not Transformer or any(
        type(block) not in (TransformerBlock, PostNormBlock) for block in model.blocks
    ):
        return False
    kinds = (Transformer, TransformerBlock, Attention, TokenEmbedding, RotaryPositions)
    modules = [module for module in model.modules() if isinstance(module, kinds)]
    attentions = [module for module in modules if isinstance(module, Attention)]
    return (
        len(attentions) == len(model.blocks)
        and all(attention.core is causal_attention for attention in attentions)
        and not any("forward" in vars(module) for module in modules)
    )


class CachingCore:
    """Causal attention with a cache of all previous keys and values (b, g, t, k). The first call has the prompt;
    each later call has a single token."""

    def __init__(self) -> None:
        self.seen: tuple[Tensor, Tensor] | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.seen is None:
            self.seen = k, v
            return causal_attention(q, k, v)
        past_k, past_v = self.seen
        self.seen = k, v = torch.cat((past_k, k), dim=2), torch.cat((past_v, v), dim=2)
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])


@contextmanager
def use_kv_cache(model: nn.Module) -> Iterator[Reader]:
    """Yield a reader that computes only new tokens. Inside the context, every attention has a caching core, and
    positions continue from call to call. Afterwards the model is restored."""
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    positions = [module for module in model.modules() if isinstance(module, (RotaryPositions, TokenEmbedding))]

    def start_at(position: int) -> None:
        for module in positions:
            module.start = position

    def read(tokens: Tensor) -> Tensor:
        nonlocal known
        start_at(known)
        new, known = tokens[:, known:], tokens.shape[1]
        return last_logits(model, new)

    known = 0
    cores = [attention.core for attention in attentions]
    for attention in attentions:
        attention.core = CachingCore()
    try:
        yield read
    finally:
        start_at(0)
        for attention, core in zip(attentions, cores, strict=True):
            attention.core = core
