"""Images with captions as the data of a run: batches as a function of (seed, number), rows of tokens, metadata."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from image_files import write_image
from tokenizers import Tokenizer, models, pre_tokenizers

from thrifty.core.errors import UsageError
from thrifty.core.model_spec import ImageModelSpec, PairModelSpec, TextModelSpec
from thrifty.core.recipe import AugmentationSettings, DataSettings, ModelSettings, ObjectiveSettings, Recipe
from thrifty.data.pairs.caption_rows import caption_rows
from thrifty.data.pairs.pair_data import open_image_pairs
from thrifty.data.run_metadata import read_model_spec
from thrifty.data.tokenizer import TextTokenizer
from thrifty.data.train_split import DataSplit
from thrifty.training.data_opening import open_examples

LENGTH = 8


@pytest.fixture(scope="module")
def shades(tmp_path_factory):
    """A source of thirty images with one to three captions each."""
    folder = tmp_path_factory.mktemp("shades")
    rows = []
    for n in range(30):
        write_image(folder / f"{n}.png", 30 + 6 * n, seed=n)
        captions = [f"shade {n}", f"the shade of the number {n} among thirty", "a shade"][: 1 + n % 3]
        rows.append({"image": f"{n}.png", "captions": captions})
    (folder / "captions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def opened(folder, seed=0, **changed):
    data_settings = {"source": str(folder), "batch": 4, "length": LENGTH, "size": 8, "held_out": 0.3, "vocabulary": 300}
    return open_image_pairs(DataSettings(**data_settings | changed), seed, None, lambda text: None)


def printed(data, batch):
    rows = zip(batch["tokens"], batch["keep"], strict=True)
    return [data.tokenizer.decode(tokens[keep].tolist()) for tokens, keep in rows]


def test_row_is_an_image_and_a_caption_with_end_of_text(shades):
    data = opened(shades)
    batch = data.train.at(0)
    assert {name: (tuple(each.shape), each.dtype) for name, each in batch.fields.items()} == {
        "inputs": ((4, 3, 8, 8), torch.float32),
        "tokens": ((4, LENGTH), torch.int64),
        "keep": ((4, LENGTH), torch.bool),
        "key": ((4,), torch.int64),
    }
    end, kept = data.tokenizer.end_of_text, batch["keep"].sum(1)
    assert torch.equal(batch["tokens"].gather(1, kept[:, None] - 1), torch.full((4, 1), end))
    assert bool((batch["tokens"][~batch["keep"]] == end).all())
    assert torch.equal(batch["keep"], torch.arange(LENGTH) < kept[:, None])


def test_captions_match_images_and_vary_by_epoch(shades):
    data = opened(shades, batch=1)
    ends, seen = data.ends.images, {}
    for step in range(4 * len(data.parts[DataSplit.TRAIN])):
        batch = data.train.at(step)
        pixels = batch["inputs"][0] * torch.tensor(ends.std).view(3, 1, 1) + torch.tensor(ends.mean).view(3, 1, 1)
        seen.setdefault(round((float(pixels.mean()) * 255 - 30) / 6), []).append(printed(data, batch)[0])
    for shade, captions in seen.items():
        assert len(captions) == 4
        for text in captions:
            words = text.removesuffix("<|endoftext|>")
            assert f"the shade of the number {shade} among thirty".startswith(words) or words in (
                f"shade {shade}",
                "a shade",
            )
    several = [captions for shade, captions in seen.items() if shade % 3 == 2]
    assert any(len(set(captions)) > 1 for captions in several)
    assert all(len(set(captions)) == 1 for shade, captions in seen.items() if shade % 3 == 0)


@settings(deadline=None, max_examples=20)
@given(step=st.integers(0, 10**5), start=st.integers(0, 3), count=st.integers(1, 4), seed=st.integers(0, 9))
def test_any_rows_equal_the_whole_batch(shades, tmp_path_factory, step, start, count, seed):
    source = opened(shades, seed, augment=AugmentationSettings(crop=1, flip=True)).train
    stop = min(start + count, 4)
    part, whole = source.rows(step, start, stop), source.at(step).rows(start, stop)
    assert all(torch.equal(part[name], whole[name]) for name in whole.fields)


def test_held_out_pairs_have_first_captions_for_every_seed(shades):
    (first,), (second,) = (list(opened(shades, seed).held_out.batches(99, 99)) for seed in (0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first.fields)
    assert all(text.startswith("shade ") for text in printed(opened(shades), first))
    assert len(set(first["key"].tolist())) == len(first)


def test_longer_captions_are_cut_and_reported(shades):
    lines = []
    wanted = DataSettings(source=str(shades), batch=4, length=4, size=8, held_out=0.3, vocabulary=300)
    data = open_image_pairs(wanted, 0, None, lines.append)
    assert any("of the captions are longer than data.length = 4 and are cut" in line for line in lines)
    batch = data.train.at(0)
    assert bool((batch["tokens"][batch["keep"].all(1)][:, -1] == data.tokenizer.end_of_text).all())
    with pytest.raises(UsageError, match=r"data.length is 1, too short for a caption"):
        opened(shades, length=1)


def given_tokenizer(path, *special):
    inner = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "shade": 2}, unk_token="<unk>"))  # noqa: S106
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens(["<|endoftext|>", *special])
    inner.save(str(path))
    return str(path)


def test_own_tokenizer_adds_the_start_of_text_like_clip(shades, tmp_path):
    plain = opened(shades, tokenizer=given_tokenizer(tmp_path / "plain.json"))
    assert plain.ends.text.vocabulary == 4 and 3 not in plain.train.at(0)["tokens"][:, 0]
    started = opened(shades, tokenizer=given_tokenizer(tmp_path / "started.json", "<|startoftext|>"))
    assert bool((started.train.at(0)["tokens"][:, 0] == 4).all())
    rows = caption_rows(["a shade", "", "a a a a a a a a a a"], started.tokenizer, LENGTH)
    assert rows["tokens"].tolist() == [[4, 1, 2, *[3] * 5], [4, *[3] * 7], [4, *[1] * 6, 3]]
    assert rows["keep"].sum(1).tolist() == [4, 2, 8]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(max_size=20), max_size=5), st.integers(2, 12))
def test_rows_of_texts_equal_a_plain_loop(texts, length):
    tokenizer = _bytes_tokenizer()
    rows = caption_rows(texts, tokenizer, length)
    assert rows["tokens"].shape == rows["keep"].shape == (len(texts), length)
    for number, text in enumerate(texts):
        own = tokenizer.encode(
            " ".join("".join(" " if ord(s) < 32 or 127 <= ord(s) < 160 else s for s in text).split())
        )
        wanted = [*own[: length - 1], tokenizer.end_of_text]
        assert rows["tokens"][number].tolist() == wanted + [tokenizer.end_of_text] * (length - len(wanted))
        assert rows["keep"][number].sum() == len(wanted)


def _bytes_tokenizer() -> TextTokenizer:
    inner = Tokenizer(
        models.BPE(vocab={sign: n for n, sign in enumerate(pre_tokenizers.ByteLevel.alphabet())}, merges=[])
    )
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.add_special_tokens(["<|endoftext|>"])
    return TextTokenizer(inner)


def test_images_of_pairs_are_augmented_but_not_mixed(shades):
    plain, changed = (
        opened(shades, augment=how).train.at(0) for how in (None, AugmentationSettings(flip=True, crop=2))
    )
    assert torch.equal(plain["tokens"], changed["tokens"]) and not torch.equal(plain["inputs"], changed["inputs"])
    with pytest.raises(UsageError, match=r"data.augment.cutmix mixes labels"):
        opened(shades, augment=AugmentationSettings(cutmix=1.0))


def test_run_folder_has_the_spec_of_images_and_text(shades, tmp_path):
    data = opened(shades)
    for name, text in data.metadata().items():
        (tmp_path / name).write_text(text)
    assert (
        read_model_spec(tmp_path, Recipe(data=DataSettings(length=LENGTH)))
        == data.ends
        == PairModelSpec(data.ends.images, TextModelSpec(data.ends.text.vocabulary, LENGTH))
    )
    assert isinstance(data.ends.images, ImageModelSpec) and data.ends.images.labels == ()
    assert {"tokenizer.json", "train.bin", "images/train.bin"} <= data.identity.keys()
    assert data.example_unit == 1 and data.facts == {"unit": "images"}


def test_a_fork_with_another_tokenizer_is_refused(shades, tmp_path):
    data = opened(shades)
    data.check_meaning(data.identity, tmp_path)
    with pytest.raises(UsageError, match="another tokenizer than the old run"):
        data.check_meaning(data.identity | {"tokenizer.json": "another"}, tmp_path)


def test_subset_of_pairs_by_number(shades):
    source = opened(shades).train
    inventory = source.example_index()
    assert inventory.count == len(opened(shades).parts[DataSplit.TRAIN]) and inventory.labels is None
    assert inventory.fingerprint == opened(shades, seed=3).train.example_index().fingerprint
    assert inventory.fingerprint != opened(shades, held_out=0.5).train.example_index().fingerprint


def test_objective_on_pairs_opens_pairs(shades):
    data_settings = DataSettings(source=str(shades), batch=4, length=LENGTH, size=8, held_out=0.3, vocabulary=300)
    recipe = Recipe(
        model=ModelSettings(preset="clip-nano"), data=data_settings, objective=ObjectiveSettings("contrastive")
    )
    objective, data = open_examples(recipe, lambda text: None)
    assert objective.learns_from == ("pairs",) and isinstance(data.ends, PairModelSpec)
    assert next(data.held_out.batches(2, 2)).fields.keys() == {"inputs", "tokens", "keep", "key"}


def test_sources_without_pairs_are_refused_with_a_fix(shades, tmp_path):
    for source, what, fix in (
        ("emojis", "no such file or folder", "data list"),
        ("kjv", "'kjv' has no images with captions", "emoji"),
        ("emoji", "'emoji' is not on this machine yet", "thrifty data get emoji"),
    ):
        with pytest.raises(UsageError) as refused:
            opened(source)
        assert what in refused.value.what and fix in refused.value.fix
    with pytest.raises(UsageError, match="the image size"):
        opened(shades, size=None)
    with pytest.raises(UsageError, match=r"images to train on, fewer than one batch of 99"):
        opened(shades, batch=99)
    assert np.all(opened(shades, size=4).parts[DataSplit.TRAIN].images.pixels.shape[1:] == (3, 4, 4))
