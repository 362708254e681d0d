import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thrifty.core.errors import UsageError
from thrifty.data.train_split import DataSplit, plan_split


def parts(documents, held_out=0.2):
    pieces = list(plan_split(documents, held_out, "here").parts(documents))
    return {part: [text for belongs, text in pieces if belongs is part] for part in DataSplit}


def many(count=400):
    return [f"document {number} " + "word " * (number % 9) for number in range(count)]


def test_held_out_split_does_not_depend_on_order():
    documents = many()
    shuffled = random.Random(0).sample(documents, len(documents))
    one, other = parts(documents), parts(shuffled)
    assert set(one[DataSplit.HELD_OUT]) == set(other[DataSplit.HELD_OUT])
    assert sorted(one[DataSplit.TRAIN]) == sorted(other[DataSplit.TRAIN])


def test_document_keeps_its_side_when_others_are_added():
    before, after = parts(many(400)), parts(many(600))
    assert set(before[DataSplit.HELD_OUT]) <= set(after[DataSplit.HELD_OUT])


def test_held_out_fraction_is_about_the_setting():
    assert 0.15 < len(parts(many(2000))[DataSplit.HELD_OUT]) / 2000 < 0.25


def test_equal_documents_are_on_the_same_side():
    divided = parts(many() * 2)
    assert not set(divided[DataSplit.TRAIN]) & set(divided[DataSplit.HELD_OUT])


@given(text=st.text(min_size=2, max_size=300), held_out=st.floats(0.001, 0.999))
def test_a_single_document_is_divided_into_two_pieces(text, held_out):
    divided = parts([text], held_out)
    assert divided[DataSplit.TRAIN][0] + divided[DataSplit.HELD_OUT][0] == text
    assert divided[DataSplit.TRAIN][0] and divided[DataSplit.HELD_OUT][0]


def test_few_documents_hold_out_the_end_of_the_longest():
    documents = ["short", "b" * 100, "a" * 100, "tiny"]
    one, other = parts(documents, 0.05), parts(documents[::-1], 0.05)
    assert one[DataSplit.HELD_OUT] == other[DataSplit.HELD_OUT] == ["b" * 5]
    assert sorted(one[DataSplit.TRAIN]) == sorted(["short", "b" * 95, "a" * 100, "tiny"])


def test_sample_of_training_text_has_about_its_size():
    documents = many(2000)
    split = plan_split(documents, 0.2, "here")
    sample = list(split.sample(documents, 10_000))
    assert 7_000 < sum(map(len, sample)) < 13_000
    assert set(sample) < set(parts(documents)[DataSplit.TRAIN])
    assert list(split.sample(documents, 10**9)) == parts(documents)[DataSplit.TRAIN]


@pytest.mark.parametrize("documents", [[], ["x"]])
def test_no_text_is_refused(documents):
    with pytest.raises(UsageError, match="'here' has no text"):
        plan_split(documents, 0.1, "here")
