import pytest
from planted_secrets import BODY, HEX, NAMED, PLANTED, SECRETS, WORD

from thrifty.core.secret_redaction import REDACTED, names_a_secret, redact, redact_command, redact_text


@pytest.mark.parametrize("name", PLANTED)
def test_known_key_formats_are_redacted_anywhere(name: str) -> None:
    shown = redact_text(f"read from (x,{PLANTED[name]}) at start")
    assert SECRETS[name] not in shown and BODY not in shown and HEX not in shown
    assert shown.startswith("read from (x,") and shown.endswith(") at start")


@pytest.mark.parametrize("text", NAMED)
def test_values_of_secret_names_are_redacted(text: str) -> None:
    for shown in (redact_text(text), redact_command([text])[0], *redact([text]), redact({"about": text})["about"]):
        assert WORD not in shown and REDACTED in shown
        assert redact_text(shown) == shown


def test_a_whole_secret_argument_is_redacted() -> None:
    assert redact_command(["--password=a,b;c &d"]) == [f"--password={REDACTED}"]


@pytest.mark.parametrize("option", ["--token", "--hub-password", "--api-key"])
def test_the_value_of_a_secret_option_is_redacted(option):
    command = ["thrifty", "train", "kjv", option, "open-sesame", "--set", "seed=1"]
    assert redact_command(command) == ["thrifty", "train", "kjv", option, REDACTED, "--set", "seed=1"]


def test_secrets_are_found_by_key_at_any_depth():
    command = ("x", "--password", WORD)
    value = {"environment": ({"HF_TOKEN": WORD, "command": command}, {"credentials": {"name": [WORD]}})}
    assert WORD not in str(redact(value))


@pytest.mark.parametrize(
    "text",
    [
        'name = "next_token"',
        "budget.tokens=1e6",
        'tokenizer = "runs/kjv/tokenizer.json"',
        "bytes_per_token = 3.71",
        "thrifty train kjv --with optimizers.adamw:betas=0.9",
        "https://example.org/a:b",
        "task-oriented risk-averse key=value",
        "hf_llama_small_baseline sk-learn-digits-baseline r8_layernorm_first_run",
        "http://localhost:8080/x@y",
    ],
)
def test_ordinary_settings_stay_readable(text):
    assert redact_text(text) == text


def test_numbers_stay_under_any_key():
    assert redact({"bytes_per_token": 3.71}) == {"bytes_per_token": 3.71}
    assert not names_a_secret("tokens_per_second")
