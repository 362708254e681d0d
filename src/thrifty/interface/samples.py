"""`sample`: generate text with a trained model."""

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import RenderableType
from torch import nn

from thrifty.core.setting_bounds import check_plain
from thrifty.core.user_objects import BuildModel
from thrifty.interface.loaded_model import load_for_sampling, own_model, read_prompt, read_question
from thrifty.models.text_generation import generate
from thrifty.reporting.printed_result import PrintedResult, lines


@dataclass(frozen=True, repr=False)
class SampledText(PrintedResult):
    """Text that a model generated."""

    path: str
    prompt: str
    text: str
    new_tokens: list[int]
    temperature: float
    top_k: int | None
    seed: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __rich__(self) -> RenderableType:
        return lines(self.text)


def sample(
    model: Any,
    prompt: str = "",
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
    chat: bool = False,
    build: nn.Module | BuildModel | str | None = None,
) -> SampledText:
    """Continue a prompt with the language model of a run or of a Hugging Face folder.

    Args:
        model: Run, run folder or its name under ./runs, or Hugging Face folder.
        prompt: Text to continue; by default the model begins a document.
        temperature: 0 picks the most likely token; others sample from the `top_k` most likely tokens, or from all.
        seed: The same seed repeats the same text.
        chat: Treat the prompt as a question; the text is the answer alone.
        build: The run's model, if it was your own.

    Raises UsageError if the model does not predict the next token.

    Example::

        print(thrifty.sample("runs/mine", "def ", tokens=20).text)
    """
    check_plain(prompt, "--prompt")
    network, tokenizer_json, context = load_for_sampling(model, own_model(model, build))
    tokenizer, start, end = (read_question if chat else read_prompt)(tokenizer_json, prompt)
    device = next(network.parameters()).device
    began = time.perf_counter()
    ids = generate(
        network,
        torch.tensor([start], device=device),
        tokens,
        temperature=temperature or 1.0,
        top_k=top_k,
        seed=seed,
        greedy=temperature == 0,
        context=context,
        stop=end,
    )[0].tolist()
    seconds = time.perf_counter() - began
    text, path = tokenizer.decode(ids[len(start) :] if chat else ids), str(getattr(model, "folder", model))
    return SampledText(path, prompt, text, ids[len(start) :], temperature, top_k, seed, seconds)
