"""Conversion between config.json of published families and `ModelConfig`.

Reading is strict. An unsupported setting that changes the computation raises an error with its name. Unknown settings
raise an error unless they are off. Dropout rates are accepted without effect.
"""

from typing import Any

from thrifty.core.errors import RefusedError
from thrifty.models.families import FAMILIES
from thrifty.models.families.model_family import Config, ModelFamily
from thrifty.models.model_config import ModelConfig

_WITHOUT_EFFECT = frozenset({
    "_name_or_path", "_num_labels", "architectures", "attention_dropout", "attn_pdrop", "bos_token_id",
    "chunk_size_feed_forward", "dtype", "embd_pdrop", "eos_token_id", "gradient_checkpointing", "id2label",
    "initializer_range", "is_decoder", "label2id", "model_type", "n_ctx", "output_attentions", "output_hidden_states",
    "output_past", "pad_token_id", "problem_type", "resid_pdrop", "return_dict", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj", "task_specific_params",
    "tokenizer_class", "torch_dtype", "transformers.js_config", "transformers_version", "unk_token_id", "use_cache",
})  # fmt: skip
_OF_GENERATION = frozenset({
    "bad_words_ids", "decoder_start_token_id", "early_stopping", "forced_bos_token_id", "forced_eos_token_id",
    "length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_beams", "num_return_sequences", "prefix",
    "repetition_penalty", "temperature", "top_k", "top_p",
})  # fmt: skip
_OFF = (None, False, [], {})


def read_shape(config: Config) -> ModelConfig:
    """Return the `ModelConfig` of a config.json. Raise RefusedError for unsupported settings. Raise UsageError for
    missing or malformed settings."""
    name = config.get("model_type")
    families = {family.model_type: family for family in FAMILIES.values()}
    if name not in families:
        raise RefusedError(
            f"config.json has model_type {name!r}; weights are imported for {', '.join(families)}",
            fix="pass a model folder with one of these types",
        )
    family = families[name]
    parts = [config, *(config[name] for name in family.sections if isinstance(config.get(name), dict))]
    for key, value in (item for part in parts for item in part.items()):
        if not _accepted(family, key, value):
            raise RefusedError(
                f"config.json sets {key} = {value!r}, which is not supported for a {name} model",
                fix=f"pass the folder of a {name} model without this setting",
            )
    return family.shape(config)


def _accepted(family: ModelFamily, key: str, value: Any) -> bool:
    if key in family.only:
        return value in family.only[key]
    understood = family.read | {own for own, _ in family.fields.values()}
    return key in understood | family.ignored | _WITHOUT_EFFECT | _OF_GENERATION or value in _OFF


def write_config(shape: ModelConfig) -> dict[str, Any]:
    """Return the content of config.json for a `ModelConfig`. Raise RefusedError for a model that the family's
    config.json cannot describe."""
    family = FAMILIES[shape.style]
    shared = {"architectures": [family.architecture], "model_type": family.model_type}
    if family.task not in ("classification", "contrastive", "masked_reconstruction"):
        shared |= {"vocab_size": shape.vocabulary, "tie_word_embeddings": shape.tied, "use_cache": True}
    return shared | family.config(shape)
