"""Export of a trained model as a folder that `transformers` loads."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model
from torch import nn

from thrifty.core.errors import RefusedError, class_name
from thrifty.core.model_spec import ImageModelSpec
from thrifty.core.user_sources import reference
from thrifty.modeling.module_surgery import find_blocks
from thrifty.modeling.structured_pruning import is_pruned
from thrifty.models.contrastive_model import LARGEST_SCALE, ContrastiveModel
from thrifty.models.hf_folder import quiet_transformers, read_json, write_json, written_aside
from thrifty.models.masked_autoencoder import MaskedAutoencoder
from thrifty.models.model_config import ModelConfig
from thrifty.models.pad_pruned import pad_pruned_model, pad_pruned_transformers
from thrifty.models.transformer import Encoder, EncoderDecoder, Transformer
from thrifty.models.vision_transformer import VisionTransformer
from thrifty.models.weight_conversion import export_folder, image_processor
from thrifty.models.wrapped_autoencoder import WrappedAutoencoder


def export_model(
    model: nn.Module,
    shape: ModelConfig | None,
    folder: Path,
    tokenizer_json: Path | None = None,
    dtype: torch.dtype = torch.float32,
    images: ImageModelSpec | None = None,
    base: Path | None = None,
) -> None:
    """Write a model of `build_model_for` as a Hugging Face folder, see `export_folder`. Adapters must already be
    merged. The generation settings of `base`, a folder with the same tokenizer, are kept."""
    if isinstance(model, ContrastiveModel) and shape is not None:
        if is_pruned(model):
            raise RefusedError(
                "a pruned model of two towers has no Hugging Face format",
                fix="train without pruning to export this model",
            )
        image, text = model.image.blocks, model.text.blocks
        sizes = {
            "depth": len(image),
            "hidden": _hidden_width(image),
            "text_depth": len(text),
            "text_hidden": _hidden_width(text),
        }
        with torch.no_grad():  # transformers does not limit it
            model.logit_scale.clamp_(max=LARGEST_SCALE)
        export_folder(model, replace(shape, **sizes), folder, tokenizer_json, dtype, images)
        return
    if isinstance(model, EncoderDecoder) and shape is not None:
        shape = replace(shape, depth=len(model.encoder.blocks), decoder_depth=len(model.decoder.blocks))
    if isinstance(model, MaskedAutoencoder) and shape is not None:
        sizes = {"hidden": _hidden_width(model.blocks), "decoder_hidden": _hidden_width(model.decoder.blocks)}
        shape = replace(shape, depth=len(model.blocks), decoder_depth=len(model.decoder.blocks), **sizes)
        export_folder(model, shape, folder, dtype=dtype, images=images)
        return
    if isinstance(model, Transformer | Encoder | EncoderDecoder | VisionTransformer) and shape is not None:
        if is_pruned(model):
            model, shape = pad_pruned_model(model, shape)
        else:  # a growing model may be exported before it reaches the width of its recipe
            shape = replace(shape, hidden=_hidden_width(find_blocks(model)[1]))
        generation = base and base / "generation_config.json"
        kept = read_json(generation) if generation and generation.is_file() else None
        export_folder(model, shape, folder, tokenizer_json, dtype, images, kept)
        return
    from thrifty.models.hf_loader import HuggingFaceModel, export_wrapped

    if not isinstance(model, HuggingFaceModel):
        raise RefusedError(
            f"a {class_name(model)} has no Hugging Face format", fix="use thrifty.models.export_own_model"
        )
    processor = image_processor(images) if images else None
    export_wrapped(model, folder, tokenizer_json, dtype, processor, keeps_generation=base is not None)


def export_own_model(
    model: nn.Module, settings: Mapping[str, Any], folder: Path, dtype: torch.dtype = torch.float32
) -> None:
    """Write a user's own model. A model of `transformers` is written by `save_pretrained`. Any other model becomes a
    state dict in model.safetensors, with a model.json of the `settings` that built the model. Of a masked autoencoder
    around the user's model, this model is written. Raise UsageError if the folder exists."""
    model = (model.encoder if isinstance(model, WrappedAutoencoder) else model).to(dtype)
    if hasattr(model, "save_pretrained") and is_pruned(model):
        model = pad_pruned_transformers(model)
    with written_aside(folder) as aside:
        if hasattr(model, "save_pretrained"):
            with quiet_transformers():
                model.save_pretrained(aside)
        else:
            save_model(model, str(aside / "model.safetensors"))
        built = {name: value for name, value in settings.items() if name in ("build", "arguments")}
        about = "model = build(**arguments); safetensors.torch.load_model(model, 'model.safetensors')"
        write_json(aside / "model.json", built | {"load": about, "class": reference(model)})


def _hidden_width(blocks: nn.ModuleList) -> int:
    return blocks[0].mlp.down.in_features  # type: ignore[union-attr,return-value]
