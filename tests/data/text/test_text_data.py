import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from thrifty.core.errors import IntegrityError, UsageError
from thrifty.core.recipe import DataSettings
from thrifty.data.text.text_data import open_text

FIRST_ROWS = """
import sys
from thrifty.core.recipe import DataSettings
from thrifty.data.text.text_data import open_text
settings = DataSettings(source=sys.argv[1], vocabulary=300, length=16, batch=4, held_out=0.2)
print(open_text(settings, 7, say=len).train.at(3)["tokens"].tolist())
"""


def settings(source, **changes):
    chosen = DataSettings(source=str(source), vocabulary=300, length=16, batch=4, held_out=0.2)
    return replace(chosen, **changes)


def quiet(text):
    pass


def test_statistics_of_text_data(stories):
    data = open_text(settings(stories), 0, quiet)
    assert data.train.at(0)["tokens"].shape == (4, 17)
    assert data.vocabulary == data.tokenizer.vocabulary == 300
    assert 0 < data.unigram_entropy < math.log(300)
    assert 1 < data.bytes_per_token < 10
    assert data.train_tokens == len(data.train.windows.tokens)
    assert data.held_out_tokens == len(data.held_out.windows.tokens)
    assert (data.folder / "tokenizer.json").is_file()


def test_examples_are_the_text(stories):
    data = open_text(settings(stories), 0, quiet)
    everything = "".join(path.read_text() for path in sorted(stories.iterdir()))
    for row in data.train.at(0)["tokens"]:
        pieces = data.tokenizer.decode(row.tolist()).split("<|endoftext|>")
        assert all(piece in everything for piece in pieces)


def test_seed_orders_training_but_not_evaluation(stories):
    one, other = (open_text(settings(stories), seed, quiet) for seed in (1, 2))
    assert not torch.equal(one.train.at(0)["tokens"], other.train.at(0)["tokens"])
    first, second = (next(data.held_out.batches(8, 8)) for data in (one, other))
    assert torch.equal(first["tokens"], second["tokens"])


def test_a_held_out_file_is_the_held_out_text(stories, tmp_path):
    (tmp_path / "valid.txt").write_text("A sentence that only the held-out file has. " * 40)
    chosen = settings(stories, held_out_source=str(tmp_path / "valid.txt"))
    data, split = open_text(chosen, 0, quiet), open_text(settings(stories), 0, quiet)
    assert data.train_tokens >= split.train_tokens + split.held_out_tokens - 40  # other merges
    held_out = data.tokenizer.decode(data.held_out.windows.tokens.tolist())
    assert held_out.removesuffix("<|endoftext|>") == (tmp_path / "valid.txt").read_text()
    (tmp_path / "valid.txt").write_text("Another text. " * 40)
    assert open_text(chosen, 0, quiet).folder != data.folder


def test_held_out_text_that_is_training_text_too_is_said(stories, tmp_path):
    said, lines = [], [f"Line {n} of a text that is divided into two files." for n in range(200)]
    (tmp_path / "train.txt").write_text("\n".join(lines[:150]))
    for first, share in ((150, None), (147, "6%"), (125, "33%")):
        (tmp_path / "valid.txt").write_text("\n".join(lines[first:]))
        held_out_source = str(tmp_path / "valid.txt")
        said.clear()
        for _ in range(2):  # built, and from the cache
            open_text(settings(tmp_path / "train.txt", held_out_source=held_out_source, length=32), 0, said.append)
        repeated = [each for each in said if "is in the training text too" in each]
        assert len(repeated) == (2 if share else 0)
        assert all(each.startswith(f"{share} of the held-out text") for each in repeated)


def test_a_held_out_file_without_text_is_refused(stories, tmp_path):
    (tmp_path / "valid.txt").write_text("\n")
    with pytest.raises(UsageError, match=r"valid\.txt"):
        open_text(settings(stories, held_out_source=str(tmp_path / "valid.txt")), 0, quiet)


@pytest.mark.slow
def test_two_processes_read_the_same_examples(stories, tmp_path):
    rows = set()
    for name in ("one", "other"):
        environment = os.environ | {"THRIFTY_CACHE": str(tmp_path / name)}
        command = [sys.executable, "-c", FIRST_ROWS, str(stories)]
        rows.add(subprocess.run(command, env=environment, capture_output=True, check=True, text=True).stdout)
    assert len(rows) == 1 and len(json.loads(rows.pop())) == 4


def test_a_data_set_shorter_than_one_batch_is_refused(stories):
    with pytest.raises(UsageError, match="fewer than one batch of 5000"):
        open_text(settings(stories, batch=5000), 0, quiet)
    with pytest.raises(UsageError, match=r"held-out text has [\d,]+ tokens, fewer than one example of length 4000"):
        open_text(settings(stories, length=4000, batch=1), 0, quiet)


@pytest.mark.parametrize(
    ("origin", "name"),
    [(json.dumps({"files": {"documents.jsonl": "0" * 64}}), "documents.jsonl"), ("{", "ORIGIN.json")],
)
def test_damaged_downloaded_set_is_refused(cache, origin, name):
    folder = cache / "sets" / "kjv"
    folder.mkdir(parents=True)
    (folder / "documents.jsonl").write_text('{"text": "In the beginning."}\n')
    (folder / "ORIGIN.json").write_text(origin)
    with pytest.raises(IntegrityError) as caught:
        open_text(settings("kjv"), 0, quiet)
    assert f"{name} is damaged" in caught.value.what and caught.value.fix == "thrifty data get kjv"
