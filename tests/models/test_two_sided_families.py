"""BERT, T5 and Marian compared with transformers: values, padding, folders in both directions."""

import json
import re

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import AUTO, TWO_SIDED, VOCABULARY
from tokenizers import Tokenizer, processors

from thrifty.core.errors import IntegrityError, RefusedError, UsageError
from thrifty.core.recipe import ModelSettings
from thrifty.models import build_model, export_model, model_shape
from thrifty.models.hf_loader import HuggingFaceCausalLM, HuggingFaceSeq2Seq
from thrifty.models.transformer import Encoder, EncoderDecoder
from thrifty.models.weight_conversion import export_folder, import_folder


@pytest.fixture(params=TWO_SIDED)
def family(request, save):
    return save(TWO_SIDED[request.param]())


@pytest.fixture
def texts():
    """Return a source longer than T5's largest distance, a shorter target, and a mask of the source's padding."""
    generator = torch.Generator().manual_seed(1)
    source, target = (torch.randint(1, VOCABULARY, (2, t), generator=generator) for t in (150, 20))
    keep = torch.ones(2, 150, dtype=torch.bool)
    keep[0, 90:], keep[1, :7] = False, False
    return source, target, keep


def logits_of_both(ours, theirs, texts, padded):
    source, target, keep = texts
    if isinstance(ours, Encoder):
        source, keep = source[:, :60], keep[:, -60:]
        given, named = (source,), {"input_ids": source}
    else:
        given, named = (source, target), {"input_ids": source, "decoder_input_ids": target}
    mask = keep if padded else None
    with torch.no_grad():
        return ours.logits(*given, mask), theirs(**named, attention_mask=None if mask is None else mask.long()).logits


def assert_same_logits(ours, theirs, texts, padded):
    mine, wanted = logits_of_both(ours, theirs, texts, padded)
    if padded and isinstance(ours, Encoder):  # outputs at padding do not matter
        keep = texts[2][:, -60:]
        mine, wanted = mine[keep], wanted[keep]
    torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("padded", [False, True])
def test_an_imported_model_has_the_logits_of_transformers(family, texts, padded):
    folder, theirs = family
    assert_same_logits(import_folder(folder)[0], theirs, texts, padded)


def test_the_head_maps_hidden_states_to_logits(family, texts):
    ours, _ = import_folder(family[0])
    source, target, keep = texts
    given = (source[:, :60],) if isinstance(ours, Encoder) else (source, target, keep)
    assert type(ours.head) is torch.nn.Linear
    torch.testing.assert_close(ours.head(ours(*given)), ours.logits(*given), rtol=0, atol=0)


def test_a_round_trip_is_bit_exact(family, tmp_path):
    first, shape = import_folder(family[0])
    export_folder(first, shape, tmp_path / "once")
    second, same_shape = import_folder(tmp_path / "once")
    export_folder(second, same_shape, tmp_path / "twice")
    assert shape == same_shape
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "once" / name).read_bytes() == (tmp_path / "twice" / name).read_bytes()


def test_an_exported_model_has_the_same_logits_in_transformers(family, texts, tokenizer_json, tmp_path):
    folder, theirs = family
    ours, shape = import_folder(folder)
    export_folder(ours, shape, tmp_path / "ours", tokenizer_json)
    again, report = AUTO[theirs.config.model_type].from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    assert_same_logits(ours, again, texts, padded=True)
    for name, value in theirs.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_an_exported_model_generates_from_the_end_of_text(save, tokenizer_json, tmp_path, texts):
    ours, shape = import_folder(save(TWO_SIDED["t5-1.0"]())[0])
    export_folder(ours, shape, tmp_path / "ours", tokenizer_json)
    theirs = AUTO["t5"].from_pretrained(tmp_path / "ours")
    source = texts[0][:1, :9]
    generated = theirs.generate(source, max_new_tokens=6, do_sample=False, eos_token_id=None)
    target = torch.zeros(1, 1, dtype=torch.long)
    for _ in range(6):
        target = torch.cat((target, ours.logits(source, target)[:, -1:].argmax(-1)), 1)
    assert torch.equal(generated, target)


def test_an_exported_tokenizer_has_its_special_tokens(save, tokenizer_json, tmp_path):
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    tokenizer.add_special_tokens(["<mask>", "[PAD]"])
    tokenizer.save(str(tokenizer_json))
    ours, shape = import_folder(save(TWO_SIDED["bert"]())[0])
    export_folder(ours, shape, tmp_path / "ours", tokenizer_json)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert (again.mask_token, again.pad_token, again.eos_token) == ("<mask>", "[PAD]", "<|endoftext|>")
    assert AUTO["bert"].from_pretrained(tmp_path / "ours").config.pad_token_id == again.pad_token_id
    assert not (tmp_path / "ours" / "generation_config.json").exists()


@pytest.mark.parametrize("own", ["$A", "<bos> $A", "[CLS] $A [SEP]"])
def test_an_exported_tokenizer_ends_and_pads_texts(save, tokenizer_json, tmp_path, own):
    ours, shape = import_folder(save(TWO_SIDED["t5-1.0"]())[0])
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    words, added = tokenizer.encode("the word").ids, [word for word in own.split() if word != "$A"]
    tokenizer.add_special_tokens(added)
    special = [(word, tokenizer.token_to_id(word)) for word in added]
    tokenizer.post_processor = processors.TemplateProcessing(own, special_tokens=special)
    tokenizer.save(str(tokenizer_json))
    export_folder(ours, shape, tmp_path / "ours", tokenizer_json)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert again("the word")["input_ids"] == [*words, 0]  # as in training, without other special tokens
    assert again(["the word", "a"], padding=True)["input_ids"][1][-1] == again.pad_token_id == again.eos_token_id == 0
    export_folder(ours, shape, tmp_path / "twice", tmp_path / "ours" / "tokenizer.json")  # ends are added once
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "twice")("the word")["input_ids"] == [*words, 0]


def test_no_parameter_is_duplicated(family):
    ours, shape = import_folder(family[0])
    names = [name for name, _ in ours.named_parameters()]
    assert len(names) == len(set(names)) and ("head.weight" in names) == (not shape.tied)
    assert (
        sum(p.numel() for p in ours.parameters())
        == sum(p.numel() for name, p in family[1].named_parameters() if "embed_positions" not in name)
        + getattr(family[1], "final_logits_bias", torch.empty(0)).numel()
    )


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("bert", {"is_decoder": True}, "is_decoder = True"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key'"),
        ("bert", {"hidden_act": "mish"}, "hidden_act = 'mish'"),
        ("bert", {"tie_word_embeddings": False}, "tie_word_embeddings = False"),
        ("bert", {"add_cross_attention": True}, "add_cross_attention = True"),
        ("t5-1.0", {"feed_forward_proj": "gated-mish"}, "feed_forward_proj = 'gated-mish'"),
        ("t5-1.1", {"dense_act_fn": "relu"}, "dense_act_fn = 'relu'"),
        ("t5-1.0", {"is_gated_act": True}, "feed_forward_proj = 'relu'"),
        ("t5-1.0", {"tie_word_embeddings": False}, "scale_decoder_outputs = True for an untied head"),
        ("t5-1.0", {"scale_decoder_outputs": False}, "ties its head without scaling it"),
        ("marian", {"share_encoder_decoder_embeddings": False}, "share_encoder_decoder_embeddings = False"),
        ("marian", {"decoder_vocab_size": 50}, "decoder_vocab_size = 50"),
        ("marian", {"decoder_attention_heads": 2}, "decoder_attention_heads = 2"),
        ("marian", {"normalize_before": True}, "normalize_before = True"),
        ("marian", {"new_trick": 2}, "new_trick = 2"),
    ],
)
def test_unsupported_settings_are_refused_by_name(save, name, changes, reason):
    folder, _ = save(TWO_SIDED[name]())
    edit_config(folder, **changes)
    with pytest.raises(RefusedError, match=re.escape(reason)):
        import_folder(folder)


def test_settings_of_published_folders_are_accepted(save):
    """Settings of bert-base-multilingual, t5-small and opus-mt-en-de besides sizes."""
    settings = {
        "bert": {"position_embedding_type": "absolute", "directionality": "bidi", "pooler_fc_size": 768,
                 "pooler_num_attention_heads": 12, "pooler_num_fc_layers": 3, "pooler_size_per_head": 128,
                 "pooler_type": "first_token_transform", "gradient_checkpointing": False},
        "t5-1.0": {"decoder_start_token_id": 0, "n_positions": 512, "output_past": True, "initializer_factor": 1.0,
                   "task_specific_params": {"translation_en_to_de": {"prefix": "translate English to German: "}},
                   "scale_decoder_outputs": "absent", "dense_act_fn": "absent", "num_decoder_layers": None},
        "marian": {"_num_labels": 3, "add_bias_logits": False, "add_final_layer_norm": False, "num_beams": 6,
                   "bad_words_ids": [[58100]], "classif_dropout": 0.0, "extra_pos_embeddings": 58101,
                   "max_length": 512, "normalize_before": False, "normalize_embedding": False,
                   "num_hidden_layers": 6, "static_position_embeddings": True},
    }  # fmt: skip
    for name, changes in settings.items():
        folder, _ = save(TWO_SIDED[name]())
        edit_config(folder, **changes)
        import_folder(folder)


def test_older_files_with_other_names_are_imported(save, texts):
    changes = {
        "bert": lambda tensors: {
            **{re.sub("LayerNorm.weight$", "LayerNorm.gamma", re.sub("LayerNorm.bias$", "LayerNorm.beta", name)): value
               for name, value in tensors.items()},
            "cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"].clone(),
            "bert.pooler.dense.weight": torch.ones(32, 32),
            "cls.seq_relationship.bias": torch.ones(2),
            "bert.embeddings.position_ids": torch.arange(64)[None],
        },
        "t5-1.0": lambda tensors: {
            **tensors,
            "encoder.embed_tokens.weight": tensors["shared.weight"].clone(),
            "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": torch.ones(32, 4),
        },
        "marian": lambda tensors: {
            **tensors,
            "lm_head.weight": tensors["model.shared.weight"].clone(),
            "model.encoder.embed_positions.weight": torch.ones(160, 32),
        },
    }  # fmt: skip
    for name, changed in changes.items():
        folder, theirs = save(TWO_SIDED[name]())
        path = folder / "model.safetensors"
        save_file(changed(load_file(path)), path)
        assert_same_logits(import_folder(folder)[0], theirs, texts, padded=True)


def test_a_repeated_tensor_with_other_values_is_refused(save):
    folder, _ = save(TWO_SIDED["t5-1.0"]())
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"decoder.embed_tokens.weight": tensors["shared.weight"] + 1}, path)
    with pytest.raises(IntegrityError, match=r"decoder\.embed_tokens\.weight and"):
        import_folder(folder)


def test_an_untied_t5_head_is_recognized_by_its_scale(save):
    folder, _ = save(TWO_SIDED["t5-1.1"]())
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True
    assert not import_folder(folder)[1].tied
    edit_config(folder, tie_word_embeddings=False, scale_decoder_outputs="absent")  # as published
    assert not import_folder(folder)[1].tied


def test_a_trained_model_exports_at_its_current_depths(tmp_path):
    settings = ModelSettings(preset="t5-nano", depth=3, width=32)
    model = build_model(settings, VOCABULARY, 16, seed=0, task="sequence_to_sequence")
    del model.decoder.blocks[1:]
    export_model(model, model_shape(settings, VOCABULARY, 16), tmp_path / "ours")
    again = AUTO["t5"].from_pretrained(tmp_path / "ours").config
    assert (again.num_layers, again.num_decoder_layers) == (3, 1)


@pytest.mark.parametrize("preset", ["bert-nano", "marian-nano"])
def test_an_untied_head_is_not_exported_to_a_tied_format(preset, tmp_path):
    settings = ModelSettings(preset=preset, depth=1, width=32, tied=False)
    task = "masked_token" if preset == "bert-nano" else "sequence_to_sequence"
    model = build_model(settings, 20, 16, seed=0, task=task)
    with pytest.raises(RefusedError, match="head is tied"):
        export_model(model, model_shape(settings, 20, 16), tmp_path / "ours")


@pytest.mark.parametrize(
    ("preset", "task", "message"),
    [
        ("bert-nano", "next_token", "cannot learn next_token: its tokens attend to later tokens"),
        ("gpt-nano", "masked_token", "cannot learn masked_token: its tokens do not attend to later tokens"),
        (
            "llama-nano",
            "sequence_to_sequence",
            "cannot learn sequence_to_sequence: its tokens do not attend to later tokens",
        ),
        ("t5-nano", "next_token", "cannot learn next_token: it maps a source text to a target text"),
        ("marian-nano", "masked_token", "cannot learn masked_token: it maps a source"),
        ("bert-nano", "classification", "cannot learn classification"),
    ],
)
def test_a_model_of_another_kind_is_refused(preset, task, message):
    with pytest.raises(UsageError, match=message) as refused:
        build_model(ModelSettings(preset=preset), VOCABULARY, 16, seed=0, task=task)
    assert "loss=" in refused.value.fix


def test_folders_are_built_for_their_own_task(save):
    for name, task, kind in (
        ("bert", "masked_token", Encoder),
        ("t5-1.0", "sequence_to_sequence", EncoderDecoder),
        ("marian", "sequence_to_sequence", EncoderDecoder),
    ):
        settings = ModelSettings(folder=str(save(TWO_SIDED[name]())[0]))
        assert isinstance(build_model(settings, VOCABULARY, 32, seed=0, task=task), kind)
        with pytest.raises(UsageError, match="cannot learn next_token"):
            build_model(settings, VOCABULARY, 32, seed=0)


def test_length_limits_only_models_with_position_tables(save):
    bert, t5 = (ModelSettings(folder=str(save(TWO_SIDED[name]())[0])) for name in ("bert", "t5-1.0"))
    with pytest.raises(UsageError, match=r"data\.length is 65"):
        build_model(bert, VOCABULARY, 65, seed=0, task="masked_token")
    build_model(t5, VOCABULARY, 5000, seed=0, task="sequence_to_sequence")


def test_unsupported_variants_are_built_by_transformers(save):
    folder, _ = save(TWO_SIDED["bert"]())
    edit_config(folder, is_decoder=True)
    model = build_model(ModelSettings(folder=str(folder), reinitialize=True), VOCABULARY, 32, seed=0)
    assert isinstance(model, HuggingFaceCausalLM)
    folder, _ = save(TWO_SIDED["marian"]())
    edit_config(folder, share_encoder_decoder_embeddings=False)
    settings = ModelSettings(folder=str(folder), reinitialize=True)
    assert isinstance(build_model(settings, VOCABULARY, 32, 0, "sequence_to_sequence"), HuggingFaceSeq2Seq)
