import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thrifty.core.batches import RankShard
from thrifty.core.errors import UsageError
from thrifty.data.text.token_windows import HeldOutWindows, PackedTokens, TokenWindows


def source(tokens=1001, length=10, batch=8, seed=3):
    return PackedTokens(np.arange(tokens, dtype=np.uint16), length, batch, seed)


@given(step=st.integers(0, 10**7), cuts=st.lists(st.integers(0, 8), max_size=5), seed=st.integers(0, 2**40))
def test_rows_in_any_parts_form_the_effective_batch(step, cuts, seed):
    packed = source(seed=seed)
    whole = packed.at(step)
    borders = [0, *sorted(cuts), 8]
    parts = [packed.rows(step, low, high) for low, high in pairwise(borders)]
    assert torch.equal(torch.cat([part["tokens"] for part in parts]), whole["tokens"])
    assert torch.equal(torch.cat([part.weight for part in parts]), whole.weight)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_together_read_the_same_batch(ranks):
    packed = source()
    shares = [RankShard(packed, rank, ranks).at(17)["tokens"] for rank in range(ranks)]
    assert torch.equal(torch.cat(shares), packed.at(17)["tokens"])


def test_batches_do_not_depend_on_earlier_requests():
    one, other = source(), source()
    for step in range(20):
        one.at(step)
    assert torch.equal(one.at(5)["tokens"], other.at(5)["tokens"])


@given(tokens=st.integers(90, 400), length=st.integers(1, 10), batch=st.integers(1, 8), epochs=st.integers(1, 3))
def test_epoch_has_every_window_once_across_batches(tokens, length, batch, epochs):
    packed = source(tokens, length, batch)
    n = packed.examples
    steps = -(-epochs * n // batch)
    firsts = torch.cat([packed.at(step)["tokens"][:, 0] for step in range(steps)])[: epochs * n]
    for epoch in firsts.split(n):
        assert sorted(epoch.tolist()) == [window * length for window in range(n)]


def test_epochs_and_seeds_have_different_orders():
    packed = source(tokens=801, batch=80)
    assert not torch.equal(packed.at(0)["tokens"], packed.at(1)["tokens"])
    assert not torch.equal(packed.at(0)["tokens"], source(tokens=801, batch=80, seed=4).at(0)["tokens"])


def test_every_token_but_the_first_is_predicted_once():
    windows = TokenWindows(np.arange(101, dtype=np.uint32), 10)
    rows = windows.at(np.arange(len(windows)))
    assert rows.dtype == torch.int64 and rows.shape == (10, 11)
    assert rows[:, 1:].flatten().tolist() == list(range(1, 101))


def test_weights_sum_to_one():
    assert source().at(0).weight.sum().item() == pytest.approx(1)


def test_text_shorter_than_one_batch_is_refused_with_a_fix():
    with pytest.raises(UsageError) as caught:
        source(tokens=71, length=10, batch=8)
    assert "71 tokens: 7 examples of length 10, fewer than one batch of 8" in caught.value.what
    assert caught.value.fix == "--set data.batch=7; or --set data.length=8"
    source(tokens=71, length=10, batch=7), source(tokens=71, length=8, batch=8)


@given(tokens=st.integers(2, 200), length=st.integers(1, 60), batch=st.integers(1, 60))
def test_fix_for_short_text_works(tokens, length, batch):
    try:
        source(tokens, length, batch)
    except UsageError as error:
        sizes = {name: int(size) for name, size in re.findall(r"--set data\.(\w+)=(\d+)", error.fix)}
        for name, size in sizes.items():
            source(**{"tokens": tokens, "length": length, "batch": batch, name: size})
        assert "length" in sizes or tokens <= batch


def test_held_out_examples_are_fixed_and_nested():
    held_out = HeldOutWindows(np.arange(501, dtype=np.uint16), 10)
    few = torch.cat([batch["tokens"] for batch in held_out.batches(6, 4)])
    many = torch.cat([batch["tokens"] for batch in held_out.batches(20, 7)])
    assert torch.equal(few, many[:6])
    assert len(torch.unique(many[:, 0])) == 20


@pytest.mark.parametrize(("examples", "taken"), [(6, 6), (64, 50)])
def test_held_out_weights_sum_to_one_over_all_batches(examples, taken):
    batches = list(HeldOutWindows(np.arange(501, dtype=np.uint16), 10).batches(examples, 4))
    assert sum(len(batch) for batch in batches) == taken
    assert torch.cat([batch.weight for batch in batches]).sum().item() == pytest.approx(1)


def test_held_out_text_shorter_than_an_example_is_refused():
    with pytest.raises(UsageError, match="10 tokens, fewer than one example of length 10"):
        HeldOutWindows(np.arange(10, dtype=np.uint16), 10)
