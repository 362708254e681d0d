import hashlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from thrifty.core.errors import UsageError
from thrifty.core.recipe import DataSettings
from thrifty.data import prepared_cache
from thrifty.data.text import token_cache
from thrifty.data.text.token_cache import cautions_of, open_token_cache, write_streams
from thrifty.data.train_split import DataSplit

PREPARE = """
import sys
from thrifty.core.recipe import DataSettings
from thrifty.data.text.token_cache import open_token_cache
said = []
prepared = open_token_cache(DataSettings(source=sys.argv[1], vocabulary=300, held_out=0.2), said.append)
print(len(said), prepared.folder)
"""


def settings(source, **changes):
    return replace(DataSettings(source=str(source), vocabulary=300, held_out=0.2), **changes)


def quiet(text):
    pass


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def documents_of(prepared, part):
    end = prepared.tokenizer.end_of_text
    tokens = prepared.tokens(part).tolist()
    assert tokens[-1] == end
    borders = [-1] + [place for place, token in enumerate(tokens) if token == end]
    return [prepared.tokenizer.decode(tokens[low + 1 : high]) for low, high in pairwise(borders)]


def test_tokens_are_ordered_documents_with_ends(stories):
    prepared = open_token_cache(settings(stories), quiet)
    held_out, train = documents_of(prepared, DataSplit.HELD_OUT), documents_of(prepared, DataSplit.TRAIN)
    texts = [path.read_text() for path in sorted(stories.iterdir())]
    assert [text for text in texts if text in train] == train
    assert sorted(train + held_out) == sorted(texts)
    assert 3 <= len(held_out) <= 25


def test_the_second_opening_does_no_work(stories):
    printed = []
    first = open_token_cache(settings(stories), printed.append)
    second = open_token_cache(settings(stories), printed.append)
    assert len(printed) == 1 and "preparing the tokens" in printed[0]
    assert first.folder == second.folder and first.manifest == second.manifest


def test_other_settings_do_not_prepare_tokens_again(stories):
    first = open_token_cache(settings(stories), quiet)
    assert open_token_cache(settings(stories, length=16, batch=2), quiet).folder == first.folder
    for change in ({"held_out": 0.3}, {"vocabulary": 290}):
        assert open_token_cache(settings(stories, **change), quiet).folder != first.folder


def test_cache_key_includes_special_tokens(stories):
    first, with_mask = (
        open_token_cache(settings(stories), quiet),
        open_token_cache(settings(stories), quiet, ("<mask>",)),
    )
    assert first.folder != with_mask.folder and open_token_cache(settings(stories), quiet, ()).folder == first.folder
    assert with_mask.tokenizer.number_of("<mask>") not in with_mask.tokens(DataSplit.TRAIN)


def test_changed_text_is_prepared_again(stories):
    first = open_token_cache(settings(stories), quiet)
    (stories / "00.txt").write_text("something else entirely")
    second = open_token_cache(settings(stories), quiet)
    assert "something else entirely" in documents_of(second, DataSplit.TRAIN) + documents_of(second, DataSplit.HELD_OUT)
    assert second.folder != first.folder


def test_statistics_match_the_definition(stories):
    prepared = open_token_cache(settings(stories), quiet)
    train, held_out = (prepared.tokens(part).tolist() for part in DataSplit)
    counts, vocabulary = Counter(train), prepared.tokenizer.vocabulary
    surprises = [-math.log((counts[token] + 1) / (len(train) + vocabulary)) for token in held_out]
    assert prepared.manifest["unigram_entropy"] == pytest.approx(sum(surprises) / len(held_out))
    size = sum(len(text.encode()) for text in documents_of(prepared, DataSplit.HELD_OUT))
    assert prepared.manifest["bytes_per_token"] == pytest.approx(size / len(held_out))
    assert prepared.manifest["tokens"] == {"train": len(train), "held_out": len(held_out)}


@pytest.mark.slow
def test_two_processes_prepare_identical_files(stories, tmp_path):
    made = []
    for name in ("one", "other"):
        environment = os.environ | {"THRIFTY_CACHE": str(tmp_path / name)}
        subprocess.run([sys.executable, "-c", PREPARE, stories], check=True, env=environment, capture_output=True)
        (folder,) = [path for path in (tmp_path / name / "prepared").iterdir() if path.is_dir()]
        made.append(digests(folder))
    assert made[0] == made[1] and set(made[0]) == {"train.bin", "held_out.bin", "tokenizer.json", "manifest.json"}


@pytest.mark.slow
def test_concurrent_ranks_build_once(stories, cache):
    command = [sys.executable, "-c", PREPARE, str(stories)]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed, folders = zip(*(rank.communicate(timeout=60)[0].split() for rank in ranks), strict=True)
    assert sorted(printed) == ["0", "1"]
    assert len(set(folders)) == 1
    left = sorted(path.name for path in (cache / "prepared").iterdir() if not path.name.endswith(".lock"))
    assert left == [os.path.basename(folders[0])]


@pytest.mark.parametrize("name", ["train.bin", "held_out.bin", "tokenizer.json", "manifest.json"])
@pytest.mark.parametrize("harm", ["flip", "truncate", "remove"])
def test_damaged_file_is_rebuilt(stories, name, harm):
    first = open_token_cache(settings(stories), quiet)
    before = digests(first.folder)
    path = first.folder / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x80
    path.unlink()
    if harm != "remove":
        path.write_bytes(content if harm == "flip" else content[: len(content) // 2])
    printed = []
    again = open_token_cache(settings(stories), printed.append)
    assert len(printed) == 1 and "again, since" in printed[0] and name in printed[0]
    assert digests(again.folder) == before


@pytest.mark.parametrize("is_dated_back", [False, True])
def test_large_files_are_hashed_daily_and_after_changes(stories, monkeypatch, is_dated_back):
    monkeypatch.setattr(prepared_cache, "HASHED", 0)
    hashed = []
    plain = prepared_cache.file_sha256
    monkeypatch.setattr(prepared_cache, "file_sha256", lambda path: (hashed.append(path.name), plain(path))[1])
    folder = open_token_cache(settings(stories), quiet).folder
    open_token_cache(settings(stories), quiet)  # first opening
    hashed.clear()
    open_token_cache(settings(stories), quiet)
    assert not hashed
    state = (folder / "train.bin").stat()
    with (folder / "train.bin").open("r+b") as file:
        file.seek(state.st_size // 2)
        byte = file.read(1)
        file.seek(state.st_size // 2)
        file.write(bytes([byte[0] ^ 0x80]))
    if is_dated_back:
        os.utime(folder / "train.bin", ns=(state.st_atime_ns, state.st_mtime_ns))
    printed = []
    open_token_cache(settings(stories), printed.append)
    assert len(printed) == 1 and "again, since train.bin has another sha256" in printed[0]
    open_token_cache(settings(stories), quiet)
    hashed.clear()
    now = prepared_cache.time.time() + prepared_cache.VERIFIED_FOR + 1
    monkeypatch.setattr(prepared_cache.time, "time", lambda: now)
    open_token_cache(settings(stories), quiet)
    assert "train.bin" in hashed


@pytest.mark.slow
def test_killed_build_leaves_no_usable_folder(tmp_path, cache):
    source = tmp_path / "long.txt"
    words = random.Random(0)
    lines = (" ".join(str(words.randrange(500)) for _ in range(20)) for _ in range(60_000))
    source.write_text("\n\n".join(lines))
    builder = subprocess.Popen([sys.executable, "-c", PREPARE, str(source)])
    while not list((cache / "prepared").glob(".*.partial-*/train.bin")):
        assert builder.poll() is None, "the build ended before it could be killed"
        time.sleep(0.005)
    builder.send_signal(signal.SIGKILL)
    builder.wait()
    assert not [path for path in (cache / "prepared").iterdir() if not path.name.startswith(".")]
    prepared = open_token_cache(settings(source), quiet)
    assert not list((cache / "prepared").glob(".*.partial-*"))
    assert sum(prepared.manifest["bytes"].values()) > 4_000_000


def test_own_tokenizer_and_large_vocabulary(stories, tmp_path):
    words = sorted({word for path in stories.iterdir() for word in path.read_text().split()})
    numbers = {word: 70_000 + place for place, word in enumerate(words)} | {"<|endoftext|>": 0, "?": 1}
    given = Tokenizer(models.WordLevel(numbers, "?"))
    given.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    given.save(str(tmp_path / "given.json"))
    prepared = open_token_cache(settings(stories, tokenizer=str(tmp_path / "given.json")), quiet)
    tokens = prepared.tokens(DataSplit.TRAIN)
    assert tokens.dtype == np.uint32 and tokens.max() > 1 << 16
    assert prepared.tokens(DataSplit.HELD_OUT)[-1] == 0
    given.save(str(tmp_path / "given.json"), pretty=False)  # other bytes of the file: prepared again
    assert open_token_cache(settings(stories, tokenizer=str(tmp_path / "given.json")), quiet).folder != prepared.folder


def test_source_that_changes_during_reading_is_refused(stories, cache, monkeypatch):
    def write_slowly(parts, *rest):
        (stories / "00.txt").write_text("changed while the tokens are written")
        return write_streams(parts, *rest)

    monkeypatch.setattr(token_cache, "write_streams", write_slowly)
    with pytest.raises(UsageError, match="changed while it was read"):
        open_token_cache(settings(stories), quiet)
    assert not list((cache / "prepared").glob("*/"))


def test_end_of_a_single_text_is_held_out(tmp_path):
    (tmp_path / "one.txt").write_text("".join(f"word{number} " for number in range(300)))
    prepared = open_token_cache(settings(tmp_path / "one.txt"), quiet)
    assert prepared.manifest["split"] == "end of the longest document"
    assert prepared.manifest["documents"] == {"train": 1, "held_out": 1}
    assert documents_of(prepared, DataSplit.HELD_OUT)[0].endswith("word299 ")


def test_a_caution_names_a_held_out_part_far_below_its_setting(tmp_path):
    for number in range(9):
        (tmp_path / f"{number}.txt").write_text("".join(f"word{number * 500 + each} " for each in range(500)))
    said = []
    prepared = open_token_cache(settings(tmp_path, held_out=0.02), said.append)
    (caution,) = cautions_of(prepared)
    assert caution in said and "of the text is held out instead of" in caution
    assert not cautions_of(open_token_cache(settings(tmp_path, held_out=0.4), quiet))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"held_out": 0.0}, "data: held_out is 0.0"),
        ({"held_out": 1.0}, "data: held_out is 1.0"),
        ({"vocabulary": 100}, "data.vocabulary is 100"),
        ({"length": 0}, "data: length is 0"),
        ({"batch": -1}, "data: batch is -1"),
        ({"tokenizer": "absent.json"}, "there is no tokenizer 'absent.json'"),
    ],
)
def test_bad_settings_are_refused_by_name(stories, changes, says):
    with pytest.raises(UsageError, match=says):
        open_token_cache(settings(stories, **changes), quiet)


@pytest.mark.parametrize("content", ["", "\n \n\n"])
def test_an_empty_file_is_refused_by_name(tmp_path, content):
    (tmp_path / "empty.txt").write_text(content)
    with pytest.raises(UsageError, match=r"empty\.txt' has no text"):
        open_token_cache(settings(tmp_path / "empty.txt"), quiet)


def test_unwritable_cache_is_refused_with_a_fix(stories, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UsageError, match="THRIFTY_CACHE"):
        open_token_cache(settings(stories), quiet)


def test_the_manifest_is_plain_json(stories):
    folder = open_token_cache(settings(stories), quiet).folder
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["source"] == str(stories) and manifest["type"] == "<u2"
