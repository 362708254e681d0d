import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from thrifty.core.batches import RankShard
from thrifty.core.errors import UsageError
from thrifty.core.recipe import DataSettings
from thrifty.data.epoch_sampler import EpochSource
from thrifty.data.text.text_data import open_text
from thrifty.data.text.text_pairs import SEPARATOR, PairFile, TextPairs, holds_pairs

PAIRS = [(f"the whale number {n} swam past", f"{n} whales were seen, or {n * 7}") for n in range(300)]


def write(path, pairs):
    if path.suffix == ".csv":
        rows = [f'"{source}","{target}"' for source, target in [("source", "target"), *pairs]]
        path.write_text("\n".join(rows), encoding="utf-8")
    elif path.suffix == ".tsv":
        path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs), encoding="utf-8")
    else:
        rows = [json.dumps({"source": source, "target": target}) for source, target in pairs]
        path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


@pytest.fixture(params=["pairs.tsv", "pairs.jsonl", "pairs.csv"])
def file(request, tmp_path):
    return write(tmp_path / request.param, PAIRS)


def settings(file, **changes):
    chosen = {"source": str(file), "vocabulary": 300, "length": 24, "batch": 8, "held_out": 0.2}
    return DataSettings(**{**chosen, **changes})


def opened(file, seed=0, **changes):
    return open_text(settings(file, **changes), seed, say=lambda text: None, pairs=True)


def texts(data, batch):
    """Return the pairs of a batch as texts, without padding and the end of text."""
    end = data.tokenizer.end_of_text
    for source, keep, tokens, counted in zip(*(batch[n] for n in ("source", "source_keep", "tokens", "counted")),
                                             strict=True):  # fmt: skip
        assert tokens[0] == end and source[keep][-1] == end and tokens[1:][counted][-1] == end
        yield (
            data.tokenizer.decode(source[keep][:-1].tolist()),
            data.tokenizer.decode(tokens[1:][counted][:-1].tolist()),
        )


def test_every_pair_is_whole_on_one_side_of_the_split(file):
    data = opened(file, length=64)
    train = set()
    for step in range(-(-data.train.examples // 8)):
        train |= set(texts(data, data.train.at(step)))
    held_out = {pair for batch in data.held_out.batches(10**6, 16) for pair in texts(data, batch)}
    assert train | held_out == set(PAIRS) and not train & held_out
    assert 30 <= len(held_out) <= 90
    assert 0 < data.unigram_entropy < math.log(300) and 1 < data.bytes_per_token < 10


def test_pairs_with_one_source_are_on_one_side_of_the_split(tmp_path):
    pairs = [(source, f"{target} {way}") for source, target in PAIRS[:60] for way in "abcd"]
    data = opened(write(tmp_path / "pairs.tsv", pairs), length=64)
    train = {source for step in range(-(-data.train.examples // 8)) for source, _ in texts(data, data.train.at(step))}
    held_out = {source for batch in data.held_out.batches(10**6, 16) for source, _ in texts(data, batch)}
    assert train and held_out and not train & held_out and len(train | held_out) == 60


def test_tsv_and_jsonl_have_the_same_pairs(tmp_path):
    batches = []
    for name in ("pairs.tsv", "pairs.jsonl"):
        data = opened(write(tmp_path / name, PAIRS))
        batches.append(data.train.at(3))
    assert all(torch.equal(batches[0][name], batches[1][name]) for name in batches[0].fields)


def test_shapes_are_fixed_and_longer_pairs_are_cut(file):
    printed = []
    data = open_text(settings(file, length=6), 0, printed.append, pairs=True)
    batch = data.train.at(0)
    shapes = {name: tuple(batch[name].shape) for name in batch.fields}
    assert shapes == {"source": (8, 6), "source_keep": (8, 6), "tokens": (8, 7), "counted": (8, 6)}
    assert batch["source_keep"].all() and batch["counted"].all()
    assert "100.0% of the pairs are longer than data.length = 6" in printed[-1]
    longer = opened(file, length=64).train.at(0)
    assert torch.equal(longer["source"][:, :6], batch["source"])
    assert torch.equal(longer["tokens"][:, :7], batch["tokens"])


@given(step=st.integers(0, 10**6), start=st.integers(0, 7), count=st.integers(1, 8), seed=st.integers(0, 99))
def test_rows_are_parts_of_the_whole_batch(step, start, count, seed):
    rng = np.random.default_rng(0)
    stream = np.concatenate([np.append(rng.integers(1, 50, rng.integers(0, 9)), 0) for _ in range(80)])
    source = EpochSource(TextPairs(stream.astype(np.uint16), 6, 0), 8, seed)
    stop = min(start + count, 8)
    part, whole = source.rows(step, start, stop), source.at(step)
    shares = [RankShard(source, rank, 2).at(step) for rank in range(2)]
    for name in whole.fields:
        assert torch.equal(part[name], whole[name][start:stop])
        assert torch.equal(torch.cat([share[name] for share in shares]), whole[name])


def test_seed_orders_training_but_not_evaluation(file):
    one, other = opened(file, seed=0), opened(file, seed=1)
    assert not torch.equal(one.train.at(0)["tokens"], other.train.at(0)["tokens"])
    first, second = (next(data.held_out.batches(8, 8)) for data in (one, other))
    assert all(torch.equal(first[name], second[name]) for name in first.fields)


def test_held_out_pairs_do_not_depend_on_the_order(tmp_path):
    one, other = (opened(write(tmp_path / f"{name}.tsv", pairs), length=64)
                  for name, pairs in (("one", PAIRS), ("other", PAIRS[::-1])))  # fmt: skip
    held_out = [{pair for batch in data.held_out.batches(999, 16) for pair in texts(data, batch)}
                for data in (one, other)]  # fmt: skip
    assert held_out[0] == held_out[1]


def test_data_is_prepared_once_and_again_after_changes(file):
    printed = []
    folders = [open_text(settings(file), 0, printed.append, pairs=True).folder for _ in range(2)]
    assert folders[0] == folders[1] and len([line for line in printed if "preparing" in line]) == 1
    write(file, PAIRS[:-1])
    changed = opened(file)
    assert changed.folder != folders[0]
    assert changed.identity.keys() == {"train.bin", "held_out.bin", "tokenizer.json"}


def test_file_of_pairs_is_recognized(tmp_path, file):
    assert holds_pairs(str(file))
    (tmp_path / "text.jsonl").write_text('{"text": "no pair"}\n')
    (tmp_path / "broken.jsonl").write_text("{source target\n")
    (tmp_path / "text.txt").write_text("source\ttarget\n")
    for name in ("text.jsonl", "broken.jsonl", "text.txt", "absent.tsv", ""):
        assert not holds_pairs(str(tmp_path / name))
    assert not holds_pairs("python-stdlib")


def test_heading_blank_lines_and_blank_sides_are_skipped(tmp_path):
    (tmp_path / "a.tsv").write_text("source\ttarget\n\none\tzwei\n \tdrei\nvier\t\n")
    assert list(PairFile(tmp_path / "a.tsv").documents()) == [f"one{SEPARATOR}zwei"]
    (tmp_path / "a.jsonl").write_text('{"source": "one", "target": null}\n{"source": "one", "target": "zwei"}\n')
    assert list(PairFile(tmp_path / "a.jsonl").documents()) == [f"one{SEPARATOR}zwei"]


@pytest.mark.parametrize(
    ("name", "line", "what"),
    [
        ("a.tsv", "one\tzwei\tdrei", "line 2: 3 columns"),
        ("a.tsv", "one", "line 2: 1 columns"),
        ("a.jsonl", '{"source": "one"}', "line 2: not a pair"),
        ("a.jsonl", '{"source": "one", "target": 2}', "line 2: not a pair"),
        ("a.jsonl", "[1]", "line 2: a JSON list"),
        ("a.jsonl", '{"source": "a\\u0000b", "target": "c"}', "line 2: a NUL character"),
        ("a.jsonl", '{"source": "a", "target": "\\ud800"}', "line 2: 'target' holds half of a surrogate pair"),
    ],
)
def test_line_that_is_no_pair_is_named(tmp_path, name, line, what):
    write(tmp_path / name, [("a", "b")])
    with (tmp_path / name).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(UsageError) as caught:
        list(PairFile(tmp_path / name).documents())
    assert what in caught.value.what and str(tmp_path / name) in caught.value.what and caught.value.fix


def test_sides_of_one_letter_are_separated(tmp_path):
    data = opened(write(tmp_path / "a.tsv", [(chr(97 + n % 26), chr(97 + n // 26)) for n in range(400)]), length=4)
    assert {len(side) for pair in texts(data, data.train.at(0)) for side in pair} == {1}
    assert data.train_tokens == 2 * data.train.examples


def test_too_few_pairs_are_refused(tmp_path):
    few = write(tmp_path / "few.tsv", PAIRS[:3])
    with pytest.raises(UsageError, match="too few pairs to hold 1% of them out"):
        opened(few, held_out=0.01)
    with pytest.raises(UsageError, match=r"has \d+ pairs to train on, fewer than one batch of 500"):
        opened(write(tmp_path / "more.tsv", PAIRS), batch=500)


def test_text_that_spells_the_end_of_text_is_refused(tmp_path):
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 2}, "a"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "t.json"))
    file = write(tmp_path / "a.tsv", [(f"a b {'b ' * n}", "b </s> a") for n in range(100)])
    with pytest.raises(UsageError, match="contains the tokenizer's end-of-text token"):
        opened(file, tokenizer=str(tmp_path / "t.json"))
