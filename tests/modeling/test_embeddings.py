"""Token tables, their multipliers, and heads."""

import math
from collections.abc import Callable

import pytest
import torch
import transformers
from stacked_models import KINDS, VOCABULARY, WIDTH
from torch import Tensor, nn

from thrifty.modeling.embeddings import (
    find_head,
    is_tied,
    output_layers,
    own_multiplier,
    size_stream,
    stack_after,
    token_tables,
)

HEADS = {
    "our llama": "head", "our gpt": "head", "our untied gpt": "head", "our bert": "head", "our t5": "head",
    "our marian": "head", "bert": "cls.predictions.decoder", "gpt2": "lm_head", "t5": "lm_head", "vit": "classifier",
    "llama": "lm_head", "gpt_neox": "lm_head", "opt": "lm_head", "marian": "lm_head", "qwen3": "lm_head",
    "phi3": "lm_head", "a user's vit": "head", "torch's encoder": "head",
}  # fmt: skip
UNTIED = {"our untied gpt", "vit", "llama", "gpt_neox", "qwen3", "phi3", "a user's vit", "torch's encoder"}


@pytest.mark.parametrize("name", KINDS)
def test_find_head_and_whether_it_is_tied(name: str) -> None:
    model = KINDS[name].model()
    named_head = find_head(model)
    assert named_head is not None and named_head[0] == HEADS[name]
    assert is_tied(named_head[1], token_tables(model)) == (name not in UNTIED)


def test_a_model_may_have_no_head() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))])
    assert find_head(model) is None


class NamelessBlock(nn.Module):
    """A block whose layer names and order reveal nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.x1, self.x2 = nn.Linear(8, 24), nn.Linear(8, 8)
        self.w1, self.w2, self.w3 = nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(8, 32)


@pytest.mark.parametrize(("kind", "heads"), [("CLIP", {"visual_projection", "text_projection"}), ("Siglip", set())])
def test_two_towers_and_their_classifier(kind: str, heads: set[str]) -> None:
    """The models are their own base models; the layers of the towers are no output layers."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    vision, text = sizes | {"image_size": 8, "patch_size": 2}, sizes | {"vocab_size": 50}
    config = getattr(transformers, f"{kind}Config")(vision_config=vision, text_config=text)
    assert {*output_layers(getattr(transformers, f"{kind}Model")(config))} == heads
    classifier = getattr(transformers, f"{kind}ForImageClassification")(config)
    assert {*output_layers(classifier)} == {"classifier"}


def nameless(**parts: nn.Module) -> nn.Module:
    """Return a model of two blocks under "z" with other parts, defined in the given order."""
    model = nn.Module()
    for name, part in parts.items():
        setattr(model, name, part)
    return model


def blocks() -> nn.ModuleList:
    return nn.ModuleList([NamelessBlock(), NamelessBlock()])


def perceptron(width: int, *widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in zip((width, *widths), widths, strict=False)))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda: nameless(e=nn.Embedding(5, 8), z=blocks(), q=nn.Linear(8, 5)), {"q"}),
        (lambda: nameless(q=nn.Linear(8, 5), y=nn.Linear(7, 8), z=blocks()), {"q"}),
        (lambda: nameless(z=blocks(), q=nn.Linear(8, 5), y=nn.Linear(7, 8)), {"q"}),
        (lambda: nameless(y=nn.Linear(8, 8), z=blocks(), q=nn.Linear(8, 8)), {"q"}),
        (lambda: nameless(z=blocks(), p=nn.Linear(8, 8), q=nn.Linear(8, 5)), {"q"}),
        (lambda: nameless(z=blocks(), h=perceptron(8, 16, 8, 3)), {"h.2"}),
        (lambda: nameless(z=blocks(), h=nn.ModuleDict({"a": nn.Linear(8, 3), "b": nn.Linear(8, 5)})), {"h.a", "h.b"}),
        (lambda: nameless(z=blocks(), h=nn.ModuleList(perceptron(8, 8, 3) for _ in "ab")), {"h.0.1", "h.1.1"}),
        (lambda: nn.Sequential(nn.Embedding(5, 8), NamelessBlock(), NamelessBlock(), nn.Linear(8, 5)), {"3"}),
        (lambda: nameless(e=nn.Embedding(5, 8), b=NamelessBlock(), q=nn.Linear(8, 5)), {"q"}),
        (lambda: perceptron(4, 8, 8, 1), {"2"}),
        (lambda: nn.Linear(4, 4), {""}),
        (lambda: nn.Sequential(), set()),
    ],
    ids=[
        "the last", "defined first", "before what makes the stream", "as wide as the stream", "behind a pooler",
        "the last of several", "two", "a list of perceptrons", "a sequence", "without a list of blocks", "a perceptron",
        "a layer", "nothing",
    ],
)  # fmt: skip
def test_output_layers_are_found_without_names(model: Callable[[], nn.Module], expected: set[str]) -> None:
    assert set(output_layers(model())) == expected


@pytest.mark.parametrize("name", KINDS)
def test_token_tables_have_a_row_per_token(name: str) -> None:
    tables = token_tables(KINDS[name].model())
    assert all(table.num_embeddings == VOCABULARY for table in tables.values())
    assert bool(tables) == ("vit" not in name)


@pytest.mark.parametrize("name", ["marian", "our marian", "our gpt", "gpt2", "t5", "our t5"])
def test_multiplier_of_embeddings_is_found(name: str) -> None:
    model = KINDS[name].model()
    expected = math.sqrt(WIDTH) if "marian" in name else 1.0
    for table in token_tables(model).values():
        assert own_multiplier(model, table) == pytest.approx(expected)


def test_a_table_belongs_to_the_stack_with_the_nearest_name() -> None:
    stacks = ["model.encoder.layers", "model.decoder.layers"]
    assert stack_after("model.decoder.embed_tokens", stacks) == stacks[1]
    assert stack_after("model.encoder.embed_positions", stacks) == stacks[0]
    assert stack_after("model.shared", stacks) == stacks[0]


def entered(model: nn.Module, name: str) -> list[Tensor]:
    """Return the inputs of the first block of each stack."""
    seen: list[Tensor] = []
    for stack in KINDS[name].stacks:
        model.get_submodule(stack)[0].register_forward_pre_hook(lambda block, args: seen.append(args[0]))
    with torch.no_grad():
        KINDS[name].loss(model)
    return seen


@pytest.mark.parametrize(
    "name", ["our llama", "our gpt", "gpt2", "llama", "gpt_neox", "t5", "our t5", "torch's encoder"]
)
def test_size_stream_scales_to_rms_one(name: str) -> None:
    model = KINDS[name].model()
    names = list(model.state_dict())
    size_stream(model)
    for x in entered(model, name):
        assert x.square().mean().sqrt() == pytest.approx(1.0, rel=0.15)
    assert list(model.state_dict()) == names


def test_size_stream_with_a_multiplier() -> None:
    plain, model = KINDS["our gpt"].model(), KINDS["our gpt"].model()
    size_stream(model, 3.0)
    torch.testing.assert_close(entered(model, "our gpt")[0], entered(plain, "our gpt")[0] * 3)
