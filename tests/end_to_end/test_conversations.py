"""From a file of conversations to a chat model: train, resume, chat, export, continue training."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from chat_runs import sums, write_rows
from command_line import CommandLine, assert_equal, write_corpus
from fast_techniques import WITHOUT_FAST
from transformers import AutoModelForCausalLM, AutoTokenizer

from thrifty.data.catalogue import entry

CHAT = {"objective__name": "chat_answers", "data__length": 48, "evaluation__at_start": True, "data__held_out": 0.2}


@pytest.fixture(scope="module")
def thrifty(tmp_path_factory: pytest.TempPathFactory) -> CommandLine:
    folder = tmp_path_factory.mktemp("conversations")
    write_corpus(folder / "corpus")
    write_rows(folder / "sums.jsonl", sums(200))
    return CommandLine(folder, {"THRIFTY_CACHE": str(folder / "cache")})


@pytest.fixture(scope="module")
def learned(thrifty: CommandLine) -> str:
    """Return a run that learned answers from the first token."""
    changed = {**CHAT, "checkpoints__every": 3, "evaluation__every": 3, "evaluation__examples": 20}
    summary = thrifty.train("learned", "--data", str(thrifty.folder / "sums.jsonl"), steps=6, **changed)
    assert summary["held_out_loss"] < summary["held_out_loss_at_start"]
    assert thrifty.records("learned", "evaluation")[0]["step"] == 0
    return "learned"


@pytest.fixture(scope="module")
def exported(thrifty: CommandLine, learned: str) -> Path:
    thrifty("export", learned, thrifty.folder / "exported")
    return thrifty.folder / "exported"


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(thrifty: CommandLine, learned: str) -> None:
    expected, evaluated = thrifty.tensors(learned), thrifty.records(learned, "evaluation")
    before = json.loads((thrifty.run(learned) / "summary.json").read_text())
    shutil.rmtree(thrifty.run(learned) / "checkpoints" / "step-00000006")
    thrifty("resume", learned)
    assert_equal(thrifty.tensors(learned), expected)
    assert thrifty.records(learned, "evaluation")[-1] == evaluated[-1]
    after = json.loads((thrifty.run(learned) / "summary.json").read_text())
    assert after["held_out_loss_at_start"] == before["held_out_loss_at_start"]


@pytest.mark.slow
def test_two_ranks_follow_the_single_process(thrifty: CommandLine, learned: str) -> None:
    words = ("--data", str(thrifty.folder / "sums.jsonl"), "--with", "parallelism.replicate")
    changed = {**CHAT, "checkpoints__every": 3, "evaluation__every": 3, "evaluation__examples": 20}
    thrifty(*thrifty.recipe("double", *words, steps=6, **changed), ranks=2)
    for kind in ("step", "evaluation"):
        one, other = (
            {record["step"]: record["loss"] for record in thrifty.records(run, kind)} for run in (learned, "double")
        )
        assert one == pytest.approx(other, rel=1e-4)


def test_plain_transformers_generates_the_same_answers(thrifty: CommandLine, learned: str, exported: Path) -> None:
    question = "What is 5 and 3?"
    options = ("--prompt", question, "--temperature", 0, "--tokens", 20, "--json")
    messages = json.loads(thrifty("chat", learned, *options).stdout)["messages"]
    assert messages == json.loads(thrifty("chat", exported, *options).stdout)["messages"]
    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    generated = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(generated, skip_special_tokens=True) == messages[1]["content"]
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    sampled = thrifty.json("sample", learned, "--chat", "--prompt", question, "--temperature", 0, "--tokens", 20)
    assert sampled["text"].removesuffix("<|im_end|>") == messages[1]["content"]


def test_chat_says_that_a_base_model_has_seen_none(thrifty: CommandLine, learned: str, exported: Path) -> None:
    thrifty.train("base", steps=1)
    options = ("--prompt", "Who?", "--tokens", 2, "--json")
    spoken = thrifty("chat", "base", *options)
    assert spoken.stderr.count("base has seen no conversation") == 1
    assert "thrifty sample " in spoken.stderr and json.loads(spoken.stdout)["messages"][1]["role"] == "assistant"
    for model in (learned, exported):
        assert "has seen no conversation" not in thrifty("chat", model, *options).stderr


@pytest.mark.slow
def test_a_chat_answers_line_by_line(thrifty: CommandLine, exported: Path) -> None:
    with (thrifty.folder / "lines.txt").open("w+") as lines:
        lines.write("What is 1 and 1?\nAnd 2 and 2?\n\nnot asked\n")
        lines.seek(0)
        talked = thrifty.json("chat", exported, "--tokens", 5, "--system", "Be brief.", stdin=lines)["messages"]
    assert [message["role"] for message in talked] == ["system", *("user", "assistant") * 2]
    assert [message["content"] for message in talked[:4:2]] == ["Be brief.", talked[2]["content"]]
    with (thrifty.folder / "lines.txt").open() as lines:
        shown = thrifty("chat", exported, "--tokens", 5, "--system", "Be brief.", stdin=lines).stdout
    assert shown == "".join(f"{talked[at]['content']}\n" for at in (2, 4))


def test_a_lora_fine_tuned_model_answers_after_export(thrifty: CommandLine, exported: Path) -> None:
    words = ("--model", str(exported), "--data", str(thrifty.folder / "sums.jsonl"), "--budget", "4steps")
    small = ("--set", "data.length=48", "--set", "data.batch=4", "--set", "data.held_out=0.2", "--set", "seed=1")
    summary = thrifty.json("train", "instruct", "--name", "tuned", *words, *small, *WITHOUT_FAST)
    assert summary["held_out_loss"] < summary["held_out_loss_at_start"]
    thrifty("export", "tuned", thrifty.folder / "merged")
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (exported, thrifty.folder / "merged"))
    changed = {name for name, value in after.named_parameters() if not torch.equal(value, before.get_parameter(name))}
    assert changed == {f"model.layers.{block}.self_attn.{part}_proj.weight" for block in range(2) for part in "qv"}
    assert AutoTokenizer.from_pretrained(thrifty.folder / "merged").chat_template


def test_padding_and_packing_have_the_same_held_out_loss(thrifty: CommandLine, learned: str) -> None:
    changed = {**CHAT, "objective__packed": False, "evaluation__examples": 20}
    summary = thrifty.train("padded", "--data", str(thrifty.folder / "sums.jsonl"), steps=1, **changed)
    packed = json.loads((thrifty.run(learned) / "summary.json").read_text())
    assert summary["held_out_loss_at_start"] == pytest.approx(packed["held_out_loss_at_start"], rel=1e-5)


def test_learned_tokens_can_be_shown_before_training(thrifty: CommandLine, exported: Path) -> None:
    words = ("data", "preview", thrifty.folder / "sums.jsonl", "--model", exported, "--examples", "2")
    shown = thrifty(*words).stdout
    assert shown.count("⟦It is ") == 2 and shown.count("<|im_end|>⟧") == 2 and "\x1b" not in shown
    seen = thrifty.json(*words)
    learned = [run for example in seen["examples"] for run in example if run["learned"]]
    assert all(run["text"].startswith("It is ") and run["text"].endswith("<|im_end|>") for run in learned)
    assert 0 < seen["learned"] < seen["tokens"] and seen["conversations"] > 100
    everything = thrifty.json(*words, "--learn-questions")
    assert everything["learned"] == everything["tokens"] - everything["conversations"]


def test_a_missing_model_is_named(thrifty: CommandLine) -> None:
    refused = thrifty("train", "instruct-kjv", exit_code=2).stderr
    assert "the model 'smollm2-135m' is not on this machine yet" in refused
    assert "thrifty data get smollm2-135m" in refused
    assert entry("smollm2-135m").model_folder.name == "huggingface"
