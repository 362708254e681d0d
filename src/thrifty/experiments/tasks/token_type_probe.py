"""Linear probe of a byte encoder: predict the Python token type of a letter from the hidden state at the letter.

Python's tokenizer labels the source files of the standard library and of torch: comment, string, keyword or name. The
prediction requires context.
"""

import io
import keyword
import tokenize
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from thrifty.core.randomness import seed_of
from thrifty.data.text.python_sources import python_files
from thrifty.experiments.tasks.language_task import TEXT_BYTES

KINDS = ("COMMENT", "STRING", "KEYWORD", "NAME")
FILES, PLACES = 40, (800, 400)
"""Number of training files, which is also the number of test files; number of letters per kind for training and for
test.
"""


def token_types(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of a source file, and for each byte its index in `KINDS`, or -1.

    Both are empty if the file is not plain ASCII or cannot be tokenized.
    """
    text = path.read_bytes()
    nothing = np.empty(0, dtype=np.uint8), np.empty(0, dtype=np.int64)
    if not text.isascii() or b"\r" in text:
        return nothing
    begins, kind = [0, *(place + 1 for place, byte in enumerate(text) if byte == 10)], np.full(len(text), -1)
    try:
        for token in tokenize.generate_tokens(io.StringIO(text.decode()).readline):
            name = tokenize.tok_name[token.type].replace("FSTRING_MIDDLE", "STRING")
            if name == "NAME" and keyword.iskeyword(token.string):
                name = "KEYWORD"
            if name in KINDS:
                (row, column), (last, end) = token.start, token.end
                kind[begins[row - 1] + column : begins[last - 1] + end] = KINDS.index(name)
    except (tokenize.TokenError, SyntaxError):
        return nothing
    return np.frombuffer(text, dtype=np.uint8), kind


@cache
def places(length: int, seed: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return byte windows (n, length) and the kind (n,) of the middle letter of each window, for training and test.

    Training and test use different files. All kinds are equally frequent.
    """
    ordered = sorted(python_files(TEXT_BYTES), key=lambda path: seed_of(path.name))
    files = [types for path in ordered[: 2 * FILES] if len((types := token_types(path))[0])]
    random, half, parts = np.random.default_rng(seed), length // 2, []
    for own, wanted in zip((files[::2], files[1::2]), PLACES, strict=True):
        text, kind = (np.concatenate(each) for each in zip(*own, strict=True))
        is_letter = (text >= ord("a")) & (text <= ord("z"))
        is_letter[:half], is_letter[-half:] = False, False
        middles = [random.choice(np.flatnonzero(is_letter & (kind == number)), wanted) for number in range(len(KINDS))]
        rows = np.concatenate(middles)[:, None] + np.arange(-half, length - half)
        parts.append(
            (torch.from_numpy(text[rows].astype(np.int64)), torch.arange(len(KINDS)).repeat_interleave(wanted))
        )
    return parts[0], parts[1]


@torch.no_grad()
def probe_accuracy(model: nn.Module, length: int, seed: int) -> float:
    """Return the test accuracy in percent of ridge regression on the middle hidden states."""
    (train_bytes, train_kinds), (test_bytes, test_kinds) = places(length, seed)
    states, test_states = middle_states(model, train_bytes), middle_states(model, test_bytes)
    mean, deviation = states.mean(0), states.std(0) + 1e-6
    states, test_states = ((each - mean) / deviation for each in (states, test_states))
    targets = nn.functional.one_hot(train_kinds).double() - 1 / len(KINDS)
    square = states.T @ states + 1e-3 * len(states) * torch.eye(states.shape[1], dtype=states.dtype)
    scores = test_states @ torch.linalg.solve(square, states.T @ targets)
    return 100 * float((scores.argmax(1) == test_kinds).double().mean())


def middle_states(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the last block's output of width d at the middle of each of n texts (n, d), in double precision."""
    seen: list[Tensor] = []
    middle = tokens.shape[1] // 2
    hook = model.blocks[-1].register_forward_hook(lambda _, inputs, states: seen.append(states[:, middle].double()))
    for part in tokens.split(64):
        model(part)
    hook.remove()
    return torch.cat(seen)
