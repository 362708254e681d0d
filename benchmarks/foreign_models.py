"""Table of techniques on foreign models: each trains, resumes bit for bit and is exported, or is refused with a reason.

    python benchmarks/foreign_models.py                  # every cell that results/foreign_models.json lacks
    python benchmarks/foreign_models.py --again lora     # recompute the cells of one technique
    python benchmarks/foreign_models.py --model Swin     # the cells of one model

The models are hand-written or of transformers. They are passed to thrifty.train as functions, with their data and
loss; CLIP with a loss of all embeddings of a batch. Techniques that leave out masked tokens or patches require a loss
of Thrifty, so their data are a text file or a folder of images. A cell with any other error contains it.
"""

import argparse
import json
import random
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from drawn_models import (  # noqa: E402
    LENGTH,
    ODDITIES,
    SIDE,
    Encoder,
    OddBlock,
    OddDecoder,
    Rows,
    built,
    classified,
    own_loss,
    sizes_of,
)
from tiny_runs import technique  # noqa: E402

import thrifty  # noqa: E402
from technique_table import rows_with_reasons  # noqa: E402
from thrifty import techniques  # noqa: E402
from thrifty.core.claims import Claim  # noqa: E402
from thrifty.core.errors import ThriftyError  # noqa: E402
from thrifty.interface.exports import export  # noqa: E402
from thrifty.models.wrapped_autoencoder import WrappedAutoencoder  # noqa: E402

FILE, PAGE = ROOT / "results" / "foreign_models.json", ROOT / "results" / "foreign_models.md"
STEPS, BATCH, VOCABULARY = 4, 6, 320
LEFT_OUT = ("parallelism.", "sparsity.mask_from_file")
"""Techniques that require several ranks or a file; `technique_table.py` has them."""
SETTINGS: dict[str, dict[str, Any]] = {
    "curriculum.low_frequency": {"multiple": 8},
    "curriculum.resolution": {"multiple": 8},
}
Case = tuple[Callable[[], nn.Module], Dataset, Callable[..., Tensor]]


class Experts(nn.Module):
    """Mixture of two experts per token, in place of a feed-forward network."""

    def __init__(self, width: int, count: int):
        super().__init__()
        self.gate = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        shares, chosen = self.gate(x).softmax(-1).topk(2)
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            share = (shares * (chosen == index)).sum(-1, keepdim=True)
            result = result + share * expert(x)
        return result


class ExpertDecoder(OddDecoder):
    def __init__(self) -> None:
        super().__init__(vocabulary=VOCABULARY)
        for block in self.blocks:
            assert isinstance(block, OddBlock)
            block.mlp = Experts(32, 3)  # type: ignore[assignment]


def masked(model: nn.Module, batch: dict[str, Tensor], reduction: str = "mean") -> Tensor:
    tokens = batch["input_ids"]
    hidden = torch.arange(tokens.shape[1]) % 4 == 0
    logits = model(tokens.masked_fill(hidden, 0))
    losses = F.cross_entropy(logits[:, hidden].mT, tokens[:, hidden], reduction=reduction)
    return losses.mean(1) if reduction == "none" else losses


def of_transformers(name: str, family: str, kind: str) -> Case:
    sizes = sizes_of(random.Random(1), family, kind, VOCABULARY)
    model = getattr(transformers, name)
    return (
        partial(built, model, sizes),
        Rows(0 if kind == "vision" else VOCABULARY),
        classified if kind == "vision" else own_loss,
    )


class Captioned(Rows):
    """Images with captions of their class."""

    def __init__(self) -> None:
        super().__init__()
        del self.fields["labels"]
        self.fields["input_ids"] = torch.full((len(self), LENGTH), 3) + self.classes[:, None]
        self.fields["input_ids"][:, -1] = 2  # end of text, where CLIP reads a caption


def pair_embeddings(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    output = model(**batch)
    return torch.stack((model.logit_scale.exp() * output.image_embeds, output.text_embeds), 1)  # type: ignore[operator]


PAIR_LOSS = thrifty.EmbeddingLoss(pair_embeddings)
TOWERS = {
    "vision_config": sizes_of(random.Random(1), "ViT", "vision", VOCABULARY),
    "text_config": sizes_of(random.Random(1), "Bert", "masked", VOCABULARY),
    "projection_dim": 16,
}
MODELS: dict[str, Case] = {
    "decoder": (partial(OddDecoder, vocabulary=VOCABULARY), Rows(VOCABULARY), ODDITIES["ALiBi"][2]),
    "encoder": (partial(Encoder, VOCABULARY), Rows(VOCABULARY), masked),
    "ViT with a stem": ODDITIES["a stem of convolutions"],
    "mixture of experts": (ExpertDecoder, Rows(VOCABULARY), ODDITIES["ALiBi"][2]),
    "Llama": of_transformers("LlamaForCausalLM", "Llama", "causal"),
    "Qwen3": of_transformers("Qwen3ForCausalLM", "Qwen3", "causal"),
    "Qwen3-MoE": of_transformers("Qwen3MoeForCausalLM", "Qwen3Moe", "causal"),
    "GPT-2": of_transformers("GPT2LMHeadModel", "GPT2", "causal"),
    "NeoX": of_transformers("GPTNeoXForCausalLM", "GPTNeoX", "causal"),
    "BERT": of_transformers("BertForMaskedLM", "Bert", "masked"),
    "DeBERTa": of_transformers("DebertaV2ForMaskedLM", "DebertaV2", "masked"),
    "T5": of_transformers("T5ForConditionalGeneration", "T5", "seq2seq"),
    "ViT": of_transformers("ViTForImageClassification", "ViT", "vision"),
    "DeiT": of_transformers("DeiTForImageClassification", "DeiT", "vision"),
    "Swin": of_transformers("SwinForImageClassification", "Swin", "vision"),
    "SigLIP": (
        partial(
            built,
            transformers.SiglipForImageClassification,
            {
                "vision_config": sizes_of(random.Random(1), "ViT", "vision", VOCABULARY),
                "text_config": {"vocab_size": 9, "hidden_size": 32},
                "num_labels": 3,
            },
        ),
        Rows(),
        classified,
    ),
    "CLIP": (partial(built, transformers.CLIPModel, TOWERS), Captioned(), PAIR_LOSS),
}


def data_of(name: str, case: Case, folder: Path) -> dict[str, Any]:
    """Return the data and the loss of a cell, as arguments of thrifty.train."""
    _, data, loss = case
    is_visual = "pixel_values" in data[0]
    if name == "data_selection.drop_masked_tokens" and not is_visual:
        text = folder / "text.txt"
        text.write_text(Path(random.__file__).read_text("utf-8"), "utf-8")
        settings = {"data.length": LENGTH, "data.vocabulary": 300, "objective.rate": 0.5, "evaluation.examples": 8}
        return {"data": str(text), "loss": "masked_token", "settings": settings}
    if name == "data_selection.drop_masked_patches" and is_visual:
        images = folder / "images"
        images.mkdir()
        for index in range(len(data)):  # type: ignore[arg-type]
            pixels = (data[index]["pixel_values"].movedim(0, -1) * 40 + 128).clamp(0, 255).byte().numpy()
            Image.fromarray(pixels).save(images / f"{index}.png")
        settings = {"data.size": SIDE, "evaluation.examples": 8}
        return {"data": str(images), "loss": "masked_reconstruction", "settings": settings}
    if name == "data_selection.gradient_norm_sampling" and loss not in (own_loss, PAIR_LOSS):
        loss = partial(loss, reduction="none")  # a score needs the loss of each example
    return {"data": data, "held_out": data, "loss": loss}


def cell(case: Case, name: str, folder: Path) -> str:
    """Return what was shown for a technique on a model, or the refusal, or the error."""
    build, one = case[0], technique(name, **SETTINGS.get(name, {}))
    optimizer = [] if Claim.OPTIMIZER in one.claims else [thrifty.AdamW(lr=3e-3)]
    whole = data_of(name, case, folder)
    passed = {} if isinstance(whole["data"], str) else whole

    def trained(run: str, **options: Any) -> Any:
        options |= {"techniques": [one, *optimizer], "budget": STEPS, "batch": BATCH, "runs": folder}
        return thrifty.train(build, name=run, quiet=True, **whole, **options)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            end = trained("whole")
            trained("parts", observers=[lambda record: record.step < 2])
            again = thrifty.resume(folder / "parts", model=build, **passed, quiet=True)
            model, other = end.load_model(), again.load_model().state_dict()
            if not all(torch.equal(value, other[key]) for key, value in model.state_dict().items()):
                return "error: the resumed run differs"
            return "trains, resumes" + exported(case, model, folder)
    except ThriftyError as refused:
        return f"refused: {refused.what}" + (f"; {refused.fix}" if refused.fix else "")
    except Exception as error:  # the table shows every error
        return f"error: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


@torch.no_grad()
def exported(case: Case, trained: nn.Module, folder: Path) -> str:
    """Export the run, if transformers has a format for its model. Return the result in words, after the exported model
    was loaded by transformers and gave the loss of the trained model."""
    build, data, loss = case
    if not hasattr(build(), "save_pretrained"):
        return ""
    try:
        export(folder / "whole", folder / "out", model=build)
    except ThriftyError as refused:
        return f", is not exported: {refused.what}"
    loaded = type(build()).from_pretrained(folder / "out").eval()  # type: ignore[attr-defined]
    trained = (trained.encoder if isinstance(trained, WrappedAutoencoder) else trained).eval()
    batch = default_collate([data[index] for index in range(BATCH)])
    difference = abs(float(loss(loaded, batch) - loss(trained, batch)))
    return ", is exported" if difference < 1e-4 else f", error: the exported model's loss differs by {difference:.2g}"


def write(table: dict[str, dict[str, str]]) -> None:
    FILE.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n", "utf-8")
    lines = [
        "# Techniques on foreign models",
        "",
        "Made by `python benchmarks/foreign_models.py`; each cell is the result of runs of a tiny model.",
        "",
    ]
    counts = {model: sum(row.get(model, "").startswith("trains") for row in table.values()) for model in MODELS}
    lines += [
        f"Of {len(table)} techniques: " + ", ".join(f"{count} {model}" for model, count in counts.items()) + ".",
        "",
    ]
    trained = {name: sum(cell.startswith("trains") for cell in row.values()) for name, row in table.items()}
    rows = {name: row | {"models": str(trained[name])} for name, row in table.items()}
    lines += rows_with_reasons(rows, [*MODELS, "models"])
    PAGE.write_text("\n".join(lines) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", nargs="*", default=[], help="techniques whose cells are recomputed")
    parser.add_argument("--model", nargs="*", default=[*MODELS], choices=MODELS)
    options = parser.parse_args()
    again = {techniques.full_name(name) for name in options.again}
    names = [name for name in techniques.own_names() if not name.startswith(LEFT_OUT)]
    table = json.loads(FILE.read_text("utf-8")) if FILE.is_file() else {}
    table = {name: table.get(name, {}) for name in names}
    for name in names:
        for model in options.model:
            if model in table[name] and name not in again:
                continue
            with tempfile.TemporaryDirectory() as folder:
                torch._dynamo.reset()
                table[name][model] = cell(MODELS[model], name, Path(folder))
            print(f"{name}, {model}: {table[name][model]}", flush=True)
            write(table)


if __name__ == "__main__":
    main()
