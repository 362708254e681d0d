"""config.json of the GPT-2 and Llama families, to a `Shape` and back.

Reading is strict: a setting that would change what is computed and that our model does not have is refused with its
name, and so is a setting nobody here knows, unless it is switched off. Dropout rates are accepted and have no effect.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from thrifty.core.errors import Refused, UsageError
from thrifty.models.presets import Shape
from thrifty.models.scaled_rotary import Llama3Scaling

Config = Mapping[str, Any]

# fmt: off
_WITHOUT_EFFECT = frozenset({
    "_name_or_path", "architectures", "attention_dropout", "attn_pdrop", "bos_token_id", "chunk_size_feed_forward",
    "dtype", "embd_pdrop", "eos_token_id", "gradient_checkpointing", "id2label", "initializer_range", "is_decoder",
    "is_llama_config", "label2id", "model_type", "n_ctx", "output_attentions", "output_hidden_states", "pad_token_id",
    "pretraining_tp", "problem_type", "resid_pdrop", "return_dict", "summary_activation", "summary_first_dropout",
    "summary_proj_to_labels", "summary_type", "summary_use_proj", "task_specific_params", "torch_dtype",
    "transformers.js_config", "transformers_version", "unk_token_id", "use_cache",
})
_GPT_KEYS = frozenset({
    "n_embd", "n_head", "n_layer", "n_inner", "vocab_size", "n_positions", "tie_word_embeddings",
    "layer_norm_epsilon",
})
_LLAMA_KEYS = frozenset({
    "num_attention_heads", "hidden_size", "head_dim", "num_hidden_layers", "num_key_value_heads",
    "intermediate_size", "vocab_size", "max_position_embeddings", "tie_word_embeddings", "rms_norm_eps",
    "rope_theta", "rope_scaling", "rope_parameters",
})
# fmt: on


@dataclass(frozen=True)
class Family:
    """What one architecture's config.json says and how: `read` are the settings its reader looks at, `only` those
    with values it can live with."""

    architecture: str
    reader: Callable[[Config], Shape]
    writer: Callable[[Shape], dict[str, Any]]
    read: frozenset[str]
    only: Mapping[str, tuple[Any, ...]]


def _number(config: Config, key: str, kind: type[int] | type[float], default: float | None = None) -> Any:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise UsageError(f"config.json has no {key}", fix=f"add {key}, or fetch the model folder again")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or kind(value) != value or value <= 0:
        wanted = "whole number" if kind is int else "number"
        raise UsageError(f"config.json: {key} is {value!r}", fix=f"it must be a positive {wanted}")
    return kind(value)


def _flag(config: Config, key: str, default: bool) -> bool:
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise UsageError(f"config.json: {key} is {value!r}", fix="it must be true or false")
    return value


def _read_gpt(config: Config) -> Shape:
    width, heads = _number(config, "n_embd", int), _number(config, "n_head", int)
    return Shape(
        style="gpt",
        depth=_number(config, "n_layer", int),
        width=width,
        heads=heads,
        kv_heads=heads,
        hidden=_number(config, "n_inner", int, 4 * width),
        vocabulary=_number(config, "vocab_size", int),
        length=_number(config, "n_positions", int),
        tied=_flag(config, "tie_word_embeddings", True),
        norm_eps=_number(config, "layer_norm_epsilon", float, 1e-5),
    )


def _write_gpt(shape: Shape) -> dict[str, Any]:
    if shape.kv_heads != shape.heads:
        raise Refused(
            f"GPT-2 has as many key-value heads as heads, this model has {shape.kv_heads} for {shape.heads}",
            fix="train with model.kv_heads equal to model.heads to export to this format",
        )
    return {
        "n_layer": shape.depth,
        "n_embd": shape.width,
        "n_head": shape.heads,
        "n_inner": shape.hidden,
        "n_positions": shape.length,
        "layer_norm_epsilon": shape.norm_eps,
        "activation_function": "gelu_new",
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


def _read_llama(config: Config) -> Shape:
    heads, width = _number(config, "num_attention_heads", int), _number(config, "hidden_size", int)
    head_width = _number(config, "head_dim", int, width // heads)
    if head_width * heads != width:
        raise Refused(f"config.json: {heads} heads of head_dim {head_width} do not make up the width {width}")
    base, scaling = _rope(config)
    return Shape(
        style="llama",
        depth=_number(config, "num_hidden_layers", int),
        width=width,
        heads=heads,
        kv_heads=_number(config, "num_key_value_heads", int, heads),
        hidden=_number(config, "intermediate_size", int),
        vocabulary=_number(config, "vocab_size", int),
        length=_number(config, "max_position_embeddings", int, 2048),
        tied=_flag(config, "tie_word_embeddings", False),
        norm_eps=_number(config, "rms_norm_eps", float, 1e-6),
        rope_base=base,
        rope_scaling=scaling,
    )


def _rope(config: Config) -> tuple[float, Llama3Scaling | None]:
    """Both spellings: `rope_parameters` of transformers 5, and `rope_theta` with `rope_scaling` of earlier ones."""
    rope = {"rope_theta": config.get("rope_theta")} | dict(config.get("rope_scaling") or {})
    rope |= dict(config.get("rope_parameters") or {})
    base = _number(rope, "rope_theta", float, 10_000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise Refused("config.json rotates only a part of each head (partial_rotary_factor), which is not imported")
    if kind == "default":
        return base, None
    if kind != "llama3":
        raise Refused(f"config.json has rotary positions of type {kind!r}; default and llama3 are imported")
    scaling = Llama3Scaling(
        factor=_number(rope, "factor", float),
        low=_number(rope, "low_freq_factor", float),
        high=_number(rope, "high_freq_factor", float),
        original=_number(rope, "original_max_position_embeddings", int),
    )
    return base, scaling


def _write_llama(shape: Shape) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default"}
    if shape.rope_scaling is not None:
        rope = {
            "rope_type": "llama3",
            "factor": shape.rope_scaling.factor,
            "low_freq_factor": shape.rope_scaling.low,
            "high_freq_factor": shape.rope_scaling.high,
            "original_max_position_embeddings": shape.rope_scaling.original,
        }
    return {
        "num_hidden_layers": shape.depth,
        "hidden_size": shape.width,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        "intermediate_size": shape.hidden,
        "max_position_embeddings": shape.length,
        "rms_norm_eps": shape.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_parameters": rope | {"rope_theta": shape.rope_base},
        "rope_theta": shape.rope_base,  # the earlier spelling, for readers that do not know rope_parameters
        "rope_scaling": None if shape.rope_scaling is None else rope,
    }


FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        _read_gpt,
        _write_gpt,
        read=_GPT_KEYS,
        only={"activation_function": ("gelu_new", "gelu_pytorch_tanh"), "scale_attn_weights": (True,)},
    ),
    "llama": Family(
        "LlamaForCausalLM",
        _read_llama,
        _write_llama,
        read=_LLAMA_KEYS,
        only={"hidden_act": ("silu", "swish")},
    ),
}

FAMILY_OF_STYLE = {"gpt": "gpt2", "llama": "llama"}


def read_shape(config: Config) -> Shape:
    """Raises Refused for what our model does not compute, UsageError for what is missing or malformed."""
    name = config.get("model_type")
    if name not in FAMILIES:
        raise Refused(f"config.json has model_type {name!r}; weights are imported for {' and '.join(FAMILIES)}")
    family = FAMILIES[name]
    for key, value in config.items():
        if key in family.read or key in _WITHOUT_EFFECT or value in family.only.get(key, (None, False, [], {})):
            continue
        raise Refused(f"config.json sets {key} = {value!r}, and a {name} model is imported only without that")
    return family.reader(config)


def write_config(shape: Shape) -> dict[str, Any]:
    name = FAMILY_OF_STYLE[shape.style]
    family = FAMILIES[name]
    shared = {
        "architectures": [family.architecture],
        "model_type": name,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.tied,
        "use_cache": True,
    }
    return shared | family.writer(shape)
