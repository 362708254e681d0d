"""environment.json describes the machine and versions of a run, and contains no secret."""

import json
import sys

import pytest

from thrifty.core.secret_redaction import redact_command
from thrifty.training.run_environment import environment

SECRETS = [
    ["--token", "s3cr3t"],
    ["--hf-token", "s3cr3t"],
    ["--api-key", "-s3cr3t"],
    ["--api_key=s3cr3t"],
    ["--set", "tracker.password=s3cr3t"],
    ["--set", "hub.access_key=s3cr3t"],
    ["HF_TOKEN=s3cr3t"],
    ["--with", "tracker:apiKey=s3cr3t"],
    ["--data=https://anna:s3cr3t@example.org/data.txt"],
]


@pytest.mark.parametrize("words", SECRETS, ids=" ".join)
def test_a_secret_on_the_command_line_is_redacted(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/home/anna/bin/thrifty", "train", *words, "--name", "mine"])
    text = json.dumps(environment("cpu"))
    assert "s3cr3t" not in text
    assert "[redacted]" in text
    assert '"--name", "mine"]' in text


def test_a_command_without_secrets_is_unchanged() -> None:
    command = [
        "thrifty", "train", "--set", "data.tokenizer=mine.json", "--budget", "tokens=1000", "--set", "data.batch=8",
        "--with", "optimizers.adamw:learning_rate=3e-4", "--data", "/data/some_long_file-name_2024.txt", "--keyboard",
    ]  # fmt: skip
    assert redact_command(command) == command


def test_the_command_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/venv/lib/thrifty/__main__.py", "train"])
    assert environment("cpu")["command"] == ["python", "-m", "thrifty", "train"]


def test_no_environment_variable_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "USER", "HOME", "HOSTNAME"):
        monkeypatch.setenv(name, "planted-value")
    facts = environment("cuda:0")
    assert "planted-value" not in json.dumps(facts)
    assert facts["device"] == "cuda:0"
    assert facts["cores"] >= 1
    assert facts["memory"] > 1 << 28
    assert set(facts) == {
        "thrifty", "python", "torch", "platform", "cpu", "cores", "memory", "device", "command", "started",
    }  # fmt: skip
