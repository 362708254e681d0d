"""Small models of `transformers` with random weights that were not used to find the planner's bounds, as recipes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import transformers

from thrifty.core.mesh import Mesh
from thrifty.core.recipe import Budget, DataSettings, EvaluationSettings, ModelSettings, ObjectiveSettings, Recipe
from thrifty.core.technique import Technique
from thrifty.experiments.tasks.language_task import source_text

WIDTH, INNER, DEPTH, HEADS, LENGTH, BATCH = 96, 384, 3, 4, 64, 8
USUAL = {
    "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS,
    "max_position_embeddings": 2 * LENGTH,
}  # fmt: skip
OF_OPT: dict[str, Any] = {
    "hidden_size": WIDTH, "word_embed_proj_dim": WIDTH, "ffn_dim": INNER, "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS, "max_position_embeddings": 2 * LENGTH,
}  # fmt: skip
OF_T5: dict[str, Any] = {
    "d_model": WIDTH, "d_ff": INNER, "d_kv": WIDTH // HEADS, "num_layers": DEPTH, "num_heads": HEADS,
    "decoder_start_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Unseen:
    config: Callable[[], transformers.PretrainedConfig]
    objective: str = "next_token"
    images: bool = False

    def write(self, folder: Path) -> None:
        """Write its config.json, which fully describes an architecture with random weights."""
        self.config().save_pretrained(folder)


UNSEEN: Mapping[str, Unseen] = {
    "GPT-2": Unseen(lambda: transformers.GPT2Config(n_embd=WIDTH, n_layer=DEPTH, n_head=HEADS, n_positions=2 * LENGTH)),
    "Llama": Unseen(lambda: transformers.LlamaConfig(**USUAL, num_key_value_heads=2)),
    "Qwen2": Unseen(lambda: transformers.Qwen2Config(**USUAL, num_key_value_heads=2)),
    "OPT": Unseen(lambda: transformers.OPTConfig(**OF_OPT)),
    "GPT-NeoX": Unseen(lambda: transformers.GPTNeoXConfig(**USUAL)),
    "BERT": Unseen(lambda: transformers.BertConfig(**USUAL), "masked_token"),
    "T5": Unseen(lambda: transformers.T5Config(**OF_T5), "sequence_to_sequence"),
    "ViT": Unseen(
        lambda: transformers.ViTConfig(
            **USUAL | {"max_position_embeddings": 0}, image_size=8, patch_size=2, num_channels=1
        ),
        "classification",
        images=True,
    ),
}


def write_all(folder: Path) -> None:
    """Write every model's folder, and a text to train on."""
    for name, model in UNSEEN.items():
        model.write(folder / name)
    (folder / "text.txt").write_bytes(source_text()[0][:400_000].tobytes())


def recipe_for(
    name: str, folder: Path, techniques: Sequence[Technique], steps: int, mesh: Mapping[str, int] | None = None
) -> Recipe:
    model = UNSEEN[name]
    text = DataSettings(source=str(folder / "text.txt"), vocabulary=512, length=LENGTH, batch=BATCH)
    data: Any = replace(text, source="digits", batch=4 * BATCH) if model.images else text
    return Recipe(
        name=name,
        device="cpu",
        model=ModelSettings(folder=str(folder / name), reinitialize=True),
        data=data,
        objective=ObjectiveSettings(model.objective),
        budget=Budget(steps=steps),
        evaluation=EvaluationSettings(examples=BATCH),
        mesh=Mesh(**mesh or {}),
        techniques=tuple(techniques),
    )
