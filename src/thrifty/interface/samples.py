"""`sample`: text from a trained model."""

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
    """Text that a model continued, or its answer to a question."""

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

    `model` is what `thrifty.train` returned, a run folder or its name under ./runs, or a Hugging Face folder. Without a
    prompt the model begins a document. `temperature=0` takes the likeliest of the `top_k` tokens, or of all. With
    `chat` the prompt is a question, and the text is the answer alone. The same seed gives the same text.
    `build` is the run's model, if it was one of your own.

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
