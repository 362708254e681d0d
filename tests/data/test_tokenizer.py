import hashlib
import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from thrifty.core.errors import UsageError
from thrifty.core.tokenizer_files import END_OF_TEXT
from thrifty.data.tokenizer import read_tokenizer, train_tokenizer

TEXTS = [f"the whale {number} swam past the harbour, {number * 7 % 13} times at dawn" for number in range(300)]
TRAINED = train_tokenizer(TEXTS, 400)


@given(st.text())
def test_any_text_is_decoded_back(text):
    assert TRAINED.decode(TRAINED.encode(text)) == text


def test_batch_encoding_equals_single_encoding():
    assert TRAINED.encode_batch(TEXTS[:20]) == [TRAINED.encode(text) for text in TEXTS[:20]]


def test_training_finds_longer_tokens_than_bytes():
    assert TRAINED.vocabulary <= 400
    assert len(TRAINED.encode(TEXTS[0])) < len(TEXTS[0]) / 2


def test_data_cannot_spell_the_end_of_text():
    tokens = TRAINED.encode(f"before{END_OF_TEXT}after")
    assert TRAINED.end_of_text not in tokens
    assert TRAINED.decode(tokens) == f"before{END_OF_TEXT}after"


@pytest.mark.slow
def test_two_processes_train_the_same_tokenizer(tmp_path):
    program = (
        "import sys; from pathlib import Path; from thrifty.data.tokenizer import train_tokenizer;"
        "texts = Path(sys.argv[1]).read_text().splitlines();"
        "train_tokenizer(texts, 400).save(Path(sys.argv[2]))"
    )
    digests = set()
    for seed in (0, 1):
        lines = random.Random(seed).sample(TEXTS, len(TEXTS))  # the order of documents does not matter either
        (tmp_path / "texts").write_text("\n".join(lines))
        (folder := tmp_path / str(seed)).mkdir()
        subprocess.run([sys.executable, "-c", program, tmp_path / "texts", folder], check=True)
        digests.add(hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest())
    assert len(digests) == 1


def test_a_saved_tokenizer_is_read_back(tmp_path):
    TRAINED.save(tmp_path)
    again = read_tokenizer(tmp_path / "tokenizer.json")
    assert again.encode_batch(TEXTS[:5]) == TRAINED.encode_batch(TEXTS[:5])
    assert (again.end_of_text, again.vocabulary) == (TRAINED.end_of_text, TRAINED.vocabulary)


@pytest.mark.parametrize("content", [b"", b"{}", b'{"model": 3}', b"\x00\x01binary", b"not json"])
def test_invalid_tokenizer_file_is_named(tmp_path, content):
    (tmp_path / "odd.json").write_bytes(content)
    with pytest.raises(UsageError, match=r"odd\.json' is not a tokenizer\.json"):
        read_tokenizer(tmp_path / "odd.json")


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"there is no tokenizer .*absent\.json"):
        read_tokenizer(tmp_path / "absent.json")


def test_a_tokenizer_without_end_of_text_is_refused(tmp_path):
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, "a")).save(str(tmp_path / "t.json"))
    with pytest.raises(UsageError, match="has no end-of-text token"):
        read_tokenizer(tmp_path / "t.json")


def test_end_of_text_of_known_tokenizers(tmp_path):
    Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 7}, "a")).save(str(tmp_path / "t.json"))
    tokenizer = read_tokenizer(tmp_path / "t.json")
    assert (tokenizer.end_of_text, tokenizer.vocabulary) == (7, 8)


def test_vocabulary_smaller_than_all_bytes_is_refused():
    with pytest.raises(UsageError, match=r"data\.vocabulary is 256"):
        train_tokenizer(TEXTS, 256)


def test_special_tokens_exist_only_on_request():
    assert TRAINED.special == {TRAINED.end_of_text}
    special = ("<mask>", "<extra_id_0>")
    tokenizer = train_tokenizer(TEXTS, 400, special)
    numbers = {tokenizer.number_of(name) for name in special}
    assert tokenizer.special == {tokenizer.end_of_text} | numbers and tokenizer.vocabulary <= 400
    text = "behind the <mask> and <extra_id_0>"
    assert not numbers & set(tokenizer.encode(text)) and tokenizer.decode(tokenizer.encode(text)) == text


def test_saved_tokenizer_keeps_special_tokens(tmp_path):
    tokenizer = train_tokenizer(TEXTS, 400, ("<mask>",))
    tokenizer.save(tmp_path)
    again = read_tokenizer(tmp_path / "tokenizer.json")
    assert again.special == tokenizer.special and again.number_of("<mask>") == tokenizer.number_of("<mask>")


def test_token_by_any_of_its_names_or_refused_with_a_fix(tmp_path):
    Tokenizer(models.WordLevel({"a": 0, "[SEP]": 1, "[MASK]": 2}, "a")).save(str(tmp_path / "t.json"))
    tokenizer = read_tokenizer(tmp_path / "t.json")
    assert tokenizer.number_of("<mask>", "[MASK]") == 2
    with pytest.raises(UsageError) as caught:
        tokenizer.number_of("<extra_id_0>")
    assert "t.json has no token <extra_id_0>" in caught.value.what and "data.tokenizer" in caught.value.fix


def test_vocabulary_too_small_for_special_tokens_is_refused():
    with pytest.raises(UsageError, match=r"data\.vocabulary is 258; at least 259 .* 2 special tokens"):
        train_tokenizer(TEXTS, 258, ("<mask>", "<extra_id_0>"))
