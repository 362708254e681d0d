import pytest

from thrifty.core.secret_redaction import REDACTED, names_a_secret, redact, redact_command, redact_text

BODY = "aB3dE5gH7jK9mN1pQ3sT5vX7zA9cD1eF"
SECRETS = [
    f"hf_{BODY}",
    f"sk-{BODY}",
    f"sk-proj-{BODY}",
    f"sk-ant-api03-{BODY}",
    f"sk_live_{BODY}",
    "AKIAIOSFODNN7EXAMPLE",
    "ASIAIOSFODNN7EXAMPLE",
    f"ghp_{BODY}",
    f"github_pat_{BODY}",
    f"glpat-{BODY}",
    f"xoxb-123456789012-{BODY}",
    f"AIza{BODY}",
    f"ya29.{BODY}",
    f"npm_{BODY}",
    f"pypi-{BODY}",
    f"nvapi-{BODY}",
    f"r8_{BODY}",
    f"gsk_{BODY}",
    f"eyJhbGciOiJIUzI1NiJ9.eyJ{BODY}.{BODY}",
    f"-----BEGIN RSA PRIVATE KEY-----\n{BODY}\n-----END RSA PRIVATE KEY-----",
]


@pytest.mark.parametrize("secret", SECRETS)
def test_known_shapes_of_keys_are_blanked_anywhere_in_a_text(secret):
    shown = redact_text(f"read from (x,{secret}) at start")
    assert secret not in shown and BODY not in shown
    assert shown.startswith("read from (x,") and shown.endswith(" at start")


@pytest.mark.parametrize(
    "text",
    [
        "WANDB_API_KEY=open-sesame",
        "password: open-sesame",
        'hub.token = "open-sesame"',
        '{"client_secret": "open-sesame"}',
        "https://user:open-sesame@example.org/x",
        "Authorization: Bearer open-sesame",
        "--access-key=open-sesame",
        "dbPassword=open-sesame",
    ],
)
def test_values_of_secret_names_are_blanked(text):
    shown = redact_text(text)
    assert "open-sesame" not in shown and REDACTED in shown


@pytest.mark.parametrize("option", ["--token", "--hub-password", "--api-key"])
def test_the_word_after_a_secret_option_is_blanked(option):
    command = ["thrifty", "train", "kjv", option, "open-sesame", "--set", "seed=1"]
    assert redact_command(command) == ["thrifty", "train", "kjv", option, REDACTED, "--set", "seed=1"]


def test_secrets_are_found_by_key_at_any_depth():
    value = {"environment": [{"HF_TOKEN": "open-sesame", "command": ["x", "--password", "open-sesame"]}]}
    assert "open-sesame" not in str(redact(value))


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
    ],
)
def test_ordinary_settings_stay_readable(text):
    assert redact_text(text) == text


def test_numbers_stay_under_any_key():
    assert redact({"bytes_per_token": 3.71}) == {"bytes_per_token": 3.71}
    assert not names_a_secret("tokens_per_second")
