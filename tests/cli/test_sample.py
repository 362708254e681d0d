import json
import math

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from thrifty.cli.sample import command
from thrifty.core.errors import ThriftyError, UsageError
from thrifty.core.recipe import ModelSettings
from thrifty.interface.loaded_model import read_prompt
from thrifty.models import build_model, export_model, model_shape
from thrifty.models.text_generation import generate
from thrifty.models.weight_conversion import import_folder


@pytest.fixture
def folder(tmp_path):
    """An exported model with random weights and a byte-level tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["a word and another word"], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = ModelSettings(preset="llama-nano", depth=1, width=32)
    model = build_model(settings, 280, 64, seed=0)
    export_model(model, model_shape(settings, 280, 64), tmp_path / "model", tmp_path / "tokenizer.json")
    return tmp_path / "model"


def run(*arguments):
    return CliRunner().invoke(command, list(map(str, arguments)), catch_exceptions=False)


def test_json_is_one_document_with_the_tokens_of_generate(folder):
    options = ["--prompt", "a word", "--tokens", 12, "--temperature", 0, "--json"]
    answer = json.loads(run(folder, *options).stdout)
    model, _ = import_folder(folder)
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("a word").ids
    expected = generate(model, torch.tensor([ids]), 12, greedy=True, stop=0)[0, len(ids) :].tolist()
    assert answer["new_tokens"] == expected
    assert answer["text"].startswith("a word") and len(answer["text"]) > len("a word")


def test_text_continues_the_prompt_and_the_seed_decides_how(folder):
    first, same, other = (
        run(folder, "--prompt", "a word", "--tokens", 20, "--seed", seed).stdout for seed in (1, 1, 2)
    )
    assert first.startswith("a word") and first == same != other


def test_without_a_prompt_the_model_begins_a_document(folder):
    answer = json.loads(run(folder, "--tokens", 5, "--json").stdout)
    assert answer["prompt"] == "" and 1 <= len(answer["new_tokens"]) <= 5


def test_prompts_stay_whole_and_text_ends_at_any_known_end(folder):
    answer = json.loads(run(folder, "--prompt", "a word and another", "--tokens", 5, "--json").stdout)
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=40)
    tokenizer.save(str(file))
    again = json.loads(run(folder, "--prompt", "a word and another", "--tokens", 5, "--json").stdout)
    assert {**again, "seconds": 0} == {**answer, "seconds": 0}
    file.write_text(file.read_text().replace("<|endoftext|>", "</s>"))
    assert read_prompt(file, "a")[2] == 0


def test_lost_weights_and_damaged_tokenizers_are_errors(folder):
    weights = load_file(folder / "model.safetensors")
    save_file({name: value * math.nan for name, value in weights.items()}, folder / "model.safetensors")
    with pytest.raises(ThriftyError, match="the model's logits are NaN"):
        run(folder)
    (folder / "tokenizer.json").write_text('{"added_tokens": "x"}')
    with pytest.raises(UsageError, match=r"is not a tokenizer\.json"):
        run(folder)


def test_invalid_prompts_and_seeds_are_refused(folder):
    with pytest.raises(UsageError, match=r"--prompt has the character"):
        run(folder, "--prompt", "a\udcff")
    assert "9223372036854775807" in run(folder, "--seed", 2**63).output


def test_unusable_models_are_refused_for_sampling(folder, tmp_path):
    with pytest.raises(UsageError, match="there is no run"):
        run(tmp_path / "nothing")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match="no tokenizer"):
        run(folder)
    assert run(folder, "--temperature", -1).exit_code == 2
