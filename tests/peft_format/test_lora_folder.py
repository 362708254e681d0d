"""LoRA in PEFT's format, compared with peft on real architectures."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, TWO_SIDED, VOCABULARY, random_model
from torch import Tensor, nn

from thrifty.core.errors import IntegrityError, RefusedError, UsageError
from thrifty.modeling.adapter_base import TRAINED_NAMES
from thrifty.modeling.lora_model import active_adapters, adapters, factor_names, merge
from thrifty.models.hf_folder import read_config
from thrifty.models.weight_conversion import export_folder, folder_shape, import_folder
from thrifty.peft_format import load_adapter, save_adapter
from thrifty.techniques.adapters.lora import Lora

CONFIGS: dict[str, Callable[[], Any]] = FAMILIES | TWO_SIDED
TOKENS = torch.arange(24).view(2, 12) * 7 % VOCABULARY
TARGETS = {
    "llama": ["q_proj", "v_proj", "down_proj"],
    "llama-grouped": ["k_proj", "embed_tokens", "lm_head"],
    "gpt2": ["c_attn", "c_proj"],
    "gpt2-untied": ["c_fc", "wte"],
    "bert": ["query", "dense"],
    "t5-1.0": ["q", "v", "wi"],
}


def fresh(family: str) -> Any:
    return random_model(CONFIGS[family]())


def logits(model: Any) -> Tensor:
    inputs = {"input_ids": TOKENS}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = TOKENS
    with torch.no_grad():
        return model(**inputs).logits


def randomize(tensors: Any) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in tensors:
            tensor.normal_(std=0.3, generator=generator)


def ours(family: str, **settings: Any) -> nn.Module:
    """Return a model with Thrifty's LoRA and random factors."""
    model = fresh(family)
    Lora(**{"rank": 3, "alpha": 5.0, **settings}).attach(model)
    parameters = dict(model.named_parameters())
    randomize(parameters[name] for name in sorted(factor_names(model)))
    return model


def in_peft(family: str, folder: Path) -> Any:
    return peft.PeftModel.from_pretrained(fresh(family), folder)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("stabilised", [False, True], ids=["", "rslora"])
@pytest.mark.parametrize("family", TARGETS)
def test_an_adapter_of_peft_computes_the_same_in_thrifty(family: str, stabilised: bool, tmp_path: Path) -> None:
    config = peft.LoraConfig(
        r=3, lora_alpha=5, lora_dropout=0.1, target_modules=TARGETS[family], use_rslora=stabilised,
        rank_pattern={TARGETS[family][0]: 5}, alpha_pattern={TARGETS[family][1]: 11},
    )  # fmt: skip
    theirs = peft.get_peft_model(fresh(family), config).eval()
    randomize(parameter for name, parameter in theirs.named_parameters() if "lora_" in name)
    theirs.save_pretrained(tmp_path / "theirs")
    model = fresh(family)
    load_adapter(model, tmp_path / "theirs")
    save_adapter(model, tmp_path / "again")  # the third side of the triangle
    expected = logits(theirs.double())  # in float32 the order of summation matters more than many errors
    for same in (model.eval(), in_peft(family, tmp_path / "again")):
        torch.testing.assert_close(logits(same.double()), expected, rtol=0, atol=1e-11)
    assert (expected - logits(fresh(family))).abs().max() > 0.1


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"where": "layers"}),
        ("llama", {"where": "embed|q_proj", "rank_stabilized": True}),
        ("llama", {"slices": "qv"}),
        ("llama", {"where": r"layers\.1\.self_attn|lm_head"}),
        ("llama", {"also": "norm"}),
        ("gpt2", {"where": "attn|mlp"}),
        ("gpt2", {"where": "c_attn", "slices": "qv", "rank_stabilized": True}),
        ("gpt2", {"where": "c_attn", "slices": "", "also": r"ln_f|c_attn\.bias"}),
        ("gpt2", {"where": "wpe", "also": "wte"}),
        ("bert", {"where": r"encoder.*dense|position_embeddings"}),
        ("t5-1.1", {"where": "SelfAttention|wi"}),
    ],
)
def test_an_adapter_of_thrifty_computes_the_same_in_peft(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model = ours(family, **settings)
    randomize(p for name, p in model.named_parameters() if p.requires_grad and name not in factor_names(model))
    save_adapter(model, tmp_path / "adapter")
    theirs = in_peft(family, tmp_path / "adapter")
    torch.testing.assert_close(logits(theirs), logits(model), rtol=1e-5, atol=5e-5)

    back = fresh(family)
    load_adapter(back, tmp_path / "adapter")
    torch.testing.assert_close(logits(back), logits(model), rtol=1e-6, atol=1e-6)
    theirs.save_pretrained(tmp_path / "theirs")
    mine, again = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "theirs"))
    assert mine.keys() <= again.keys()  # peft adds the base weights of adapted embeddings
    assert all(torch.equal(again[name], tensor) for name, tensor in mine.items())


@pytest.mark.sampled(7)
@pytest.mark.parametrize("family", ["llama-grouped", "llama-tied", "gpt2", "gpt1", "bert", "t5-1.0", "marian"])
@pytest.mark.parametrize("slices", ["qkv", "qv", ""])
def test_an_adapter_of_an_own_model_fits_its_exported_base(family: str, slices: str, tmp_path: Path) -> None:
    base = fresh(family)
    base.save_pretrained(tmp_path / "base")
    model, shape = import_folder(tmp_path / "base")
    export_folder(model, shape, tmp_path / "exported")
    Lora(rank=3, alpha=5.0, slices=slices, also=r"blocks\.1\.mlp_norm").attach(model)
    parameters = dict(model.named_parameters())
    randomize(p for p in parameters.values() if p.requires_grad)
    save_adapter(model, tmp_path / "adapter", shape=shape)

    auto = type(base).from_pretrained(tmp_path / "exported").eval()
    in_peft = logits(peft.PeftModel.from_pretrained(auto, tmp_path / "adapter"))
    inputs = (TOKENS, TOKENS) if base.config.is_encoder_decoder else (TOKENS,)
    with torch.no_grad():
        wanted = model.eval().logits(*inputs)
    torch.testing.assert_close(in_peft, wanted, rtol=1e-4, atol=1e-4)

    again, _ = import_folder(tmp_path / "base")
    load_adapter(again, tmp_path / "adapter", shape=shape)
    with torch.no_grad():
        torch.testing.assert_close(again.eval().logits(*inputs), wanted, rtol=1e-5, atol=1e-5)


def test_adapted_embeddings_of_own_models_are_exported(tmp_path: Path) -> None:
    base = fresh("gpt2-untied")
    base.save_pretrained(tmp_path / "base")
    model, shape = import_folder(tmp_path / "base")
    Lora(rank=3, where="embedding|head").attach(model)
    randomize(p for p in model.parameters() if p.requires_grad)
    save_adapter(model, tmp_path / "adapter", shape=shape)
    in_peft = logits(peft.PeftModel.from_pretrained(base, tmp_path / "adapter"))
    with torch.no_grad():
        torch.testing.assert_close(in_peft, model.eval().logits(TOKENS), rtol=1e-4, atol=1e-4)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)


def test_torchs_own_attention_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Encoder(), torch.randn(2, 5, 16)
    config = peft.LoraConfig(r=2, target_modules=["self_attn"])
    theirs = peft.get_peft_model(model, config)
    randomize(parameter for name, parameter in theirs.named_parameters() if "lora_" in name)
    theirs.save_pretrained(tmp_path / "theirs")
    merged = theirs.merge_and_unload()
    attention, factors = merged.encoder.layers[0].self_attn, load_file(tmp_path / "theirs/adapter_model.safetensors")
    key = "base_model.model.encoder.layers.0.self_attn.base_layer.out_proj.lora_{}.weight"
    product = factors[key.format("B")] @ factors[key.format("A")] * config.lora_alpha / 2
    torch.manual_seed(0)
    before = Encoder().encoder.layers[0].self_attn.out_proj.weight
    torch.testing.assert_close(
        attention.out_proj.weight - before, 2 * product
    )  # once this fails, such folders can be supported
    for path in ("self_attn", "out_proj"):
        with pytest.raises(RefusedError, match="torch's own attention"):
            save_adapter(Lora(rank=2, where=path).attach(Encoder()), tmp_path / "ours")
    with pytest.raises(RefusedError, match="torch's own attention"):
        load_adapter(Encoder(), tmp_path / "theirs")
    save_adapter(Lora(rank=2, where="linear").attach(Encoder()), tmp_path / "ours")
    again = Encoder()
    load_adapter(again, tmp_path / "ours")
    assert again(x).isfinite().all()


def test_several_folders_share_one_base(tmp_path: Path) -> None:
    wanted = {}
    for seed, name in enumerate(("french", "verse")):
        model = fresh("llama")
        Lora(rank=3, seed=seed).attach(model)
        randomize(p for p in model.parameters() if p.requires_grad)
        save_adapter(model, tmp_path / name)
        wanted[name] = logits(model)
    base = fresh("llama")
    before = {name: parameter.data_ptr() for name, parameter in base.named_parameters()}
    for name in wanted:
        load_adapter(base, tmp_path / name, name)
    assert adapters(base) == ["french", "verse"]
    for name, expected in wanted.items():
        with active_adapters(base, name):
            torch.testing.assert_close(logits(base), expected, rtol=1e-6, atol=1e-6)
    after = {name: parameter.data_ptr() for name, parameter in base.named_parameters()}
    assert {name: after[name] for name in before} == before
    model = ours("llama", also="norm")
    randomize([model.model.norm.weight])
    save_adapter(model, tmp_path / "own-norm")
    with pytest.raises(RefusedError, match=r"change 'model\.norm\.weight' of the base"):
        load_adapter(base, tmp_path / "own-norm", "own")
    assert adapters(base) == ["french", "verse"]


def test_settings_name_the_base_and_its_task(tmp_path: Path) -> None:
    save_adapter(ours("gpt2"), tmp_path / "adapter", base="some/model", dtype=torch.bfloat16)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["task_type"]) == ("LORA", "CAUSAL_LM")
    assert config["base_model_name_or_path"] == "some/model"
    assert config["target_modules"] == ["c_attn", "c_fc", "c_proj"]
    assert (config["r"], config["rank_pattern"], config["alpha_pattern"]) == (3, {"c_attn": 9}, {"c_attn": 15})
    assert config["fan_in_fan_out"] is True
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight" in tensors
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
_WHISPER = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8,
    "max_source_positions": 12, "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "also", "task"),
    [
        ("BertForSequenceClassification", "", None),
        ("BertForSequenceClassification", "^classifier", "SEQ_CLS"),
        ("LlamaForSequenceClassification", "", None),
        ("WhisperForConditionalGeneration", "", None),
    ],
)
def test_a_task_is_written_only_if_peft_can_load_it(kind: str, also: str, task: str, tmp_path: Path) -> None:
    """For classification PEFT requires a head in the folder; for encoder-decoders, token inputs."""
    config_class = getattr(transformers, kind.partition("For")[0] + "Config")
    config = config_class(**(_WHISPER if "Whisper" in kind else _SIZES))
    inputs: dict[str, Any] = {"input_ids": TOKENS}
    if "Whisper" in kind:
        inputs = {"input_features": torch.linspace(-1, 1, 2 * 8 * 24).view(2, 8, 24), "decoder_input_ids": TOKENS}

    def base() -> Any:
        torch.manual_seed(0)
        return getattr(transformers, kind)(config).eval()

    model = base()
    Lora(rank=2, also=also).attach(model)
    parameters = dict(model.named_parameters())
    randomize(parameters[name] for name in sorted(TRAINED_NAMES.of(model)))
    save_adapter(model, tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["task_type"] == task
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path / "adapter").eval()
    torch.testing.assert_close(loaded(**inputs).logits, model(**inputs).logits, rtol=1e-4, atol=1e-5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_adapter(ours("llama"), tmp_path / "adapter")
    return tmp_path / "adapter"


def change(folder: Path, **settings: Any) -> None:
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text()) | settings
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "gone"}))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"peft_type": "LORRA"}, UsageError, "did you mean 'LORA'"),
        ({"peft_type": "LOHA"}, UsageError, "peft_type 'LOHA' is not supported"),
        ({"r": "gone", "rr": 3}, UsageError, "there is no setting rr"),
        ({"lora_alhpa": 3}, UsageError, "did you mean 'lora_alpha'"),
        ({"use_dora": True}, RefusedError, "sets use_dora = True, which is not supported"),
        ({"init_lora_weights": "pissa"}, RefusedError, "init_lora_weights = 'pissa'"),
        ({"r": 4}, IntegrityError, "two matrices of rank 4"),
        ({"rank_pattern": {"q_proj": 7}}, IntegrityError, "the factors of 'model.layers.0.self_attn.q_proj'"),
        ({"rank_pattern": {"(": 7}}, UsageError, "an invalid pattern"),
        ({"lora_alpha": "much"}, IntegrityError, "has 'much'"),
        ({"lora_alpha": math.nan}, IntegrityError, "has nan"),
        ({"lora_dropout": None}, IntegrityError, "lora_dropout is None"),
        ({"rank_pattern": ["q_proj"]}, IntegrityError, "rank_pattern is .'q_proj'."),
        ({"peft_type": ["LORA"]}, UsageError, "peft_type .'LORA'. is not supported"),
    ],
)
def test_unsupported_settings_are_refused(
    folder: Path, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    change(folder, **settings)
    model = fresh("llama")
    with pytest.raises(error, match=message):
        load_adapter(model, folder)
    assert not adapters(model) and all(parameter.requires_grad for parameter in model.parameters())


def test_unknown_settings_that_are_off_are_accepted(folder: Path) -> None:
    change(folder, some_later_idea=None, another={}, peft_version="9.0")
    load_adapter(fresh("llama"), folder)


def test_damaged_foreign_and_pickled_folders_have_own_errors(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match=r"for a layer .*, which the model does not have"):
        load_adapter(fresh("gpt2"), folder)
    small = random_model(FAMILIES["llama-grouped"]())
    with pytest.raises(IntegrityError, match=r"the factors of '.*k_proj' are for 32 by 32, the layer is 32 by 16"):
        load_adapter(small, folder)
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    save_file(tensors | {"base_model.model.model.nrom.weight": torch.zeros(32)}, weights)
    with pytest.raises(IntegrityError, match=r"no parameters \['model.nrom.weight'\]"):
        load_adapter(fresh("llama"), folder)
    weights.write_bytes(weights.read_bytes()[:-7])
    with pytest.raises(IntegrityError, match="is damaged"):
        load_adapter(fresh("llama"), folder)
    weights.rename(folder / "adapter_model.bin")
    with pytest.raises(UsageError, match=r"adapter_model\.bin, a pickle"):
        load_adapter(fresh("llama"), folder)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(IntegrityError, match="cannot be read as JSON"):
        load_adapter(fresh("llama"), folder)
    with pytest.raises(UsageError, match=r"has no adapter_config\.json"):
        load_adapter(fresh("llama"), tmp_path / "nothing")


def test_writing_is_atomic_and_never_overwrites(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(UsageError, match="exists already"):
        save_adapter(ours("llama", rank=2), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    with pytest.raises(RefusedError, match=r"save model\.norm|contains adapted layers"):
        save_adapter(ours("bert", where="transform", also=r"predictions\.bias"), folder.parent / "other")
    with pytest.raises(UsageError, match="no adapter 'frnch'"):
        save_adapter(ours("llama"), folder.parent / "other", "frnch")
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_trained_tied_weight_is_stored_under_both_names(tmp_path: Path) -> None:
    model = ours("llama-tied", also="embed_tokens")
    randomize([model.model.embed_tokens.weight])
    save_adapter(model, tmp_path / "adapter")
    torch.testing.assert_close(logits(in_peft("llama-tied", tmp_path / "adapter")), logits(model), rtol=1e-5, atol=1e-5)
    again = fresh("llama-tied")
    load_adapter(again, tmp_path / "adapter")
    assert torch.equal(logits(again), logits(model))
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(weights)
    save_file(tensors | {"base_model.model.lm_head.weight": torch.zeros(VOCABULARY, 32)}, weights)
    with pytest.raises(RefusedError, match="one tensor in the model, but were trained separately"):
        load_adapter(fresh("llama-tied"), tmp_path / "adapter")


def test_a_loaded_adapter_can_be_merged_and_exported(folder: Path, tmp_path: Path) -> None:
    fresh("llama").save_pretrained(tmp_path / "base")
    model, shape = import_folder(tmp_path / "base")
    with pytest.raises(UsageError, match="depend on its shape"):
        load_adapter(model, folder)
    load_adapter(model, folder, shape=folder_shape(tmp_path / "base"))
    with torch.no_grad():
        apart = model.eval().logits(TOKENS)
        merge(model)
        torch.testing.assert_close(model.logits(TOKENS), apart, rtol=1e-4, atol=1e-4)
    assert read_config(tmp_path / "base")["model_type"] == shape.style
