import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thrifty.core.errors import UsageError
from thrifty.data.train_split import Part, plan_split


def parts(documents, held_out=0.2):
    pieces = list(plan_split(documents, held_out, "here").parts(documents))
    return {part: [text for belongs, text in pieces if belongs is part] for part in Part}


def many(count=400):
    return [f"document {number} " + "word " * (number % 9) for number in range(count)]


def test_held_out_split_does_not_depend_on_order():
    documents = many()
    shuffled = random.Random(0).sample(documents, len(documents))
    one, other = parts(documents), parts(shuffled)
    assert set(one[Part.HELD_OUT]) == set(other[Part.HELD_OUT])
    assert sorted(one[Part.TRAIN]) == sorted(other[Part.TRAIN])


def test_a_document_keeps_its_side_when_others_come():
    before, after = parts(many(400)), parts(many(600))
    assert set(before[Part.HELD_OUT]) <= set(after[Part.HELD_OUT])


def test_the_share_is_about_the_one_asked_for():
    assert 0.15 < len(parts(many(2000))[Part.HELD_OUT]) / 2000 < 0.25


def test_equal_documents_fall_on_the_same_side():
    divided = parts(many() * 2)
    assert not set(divided[Part.TRAIN]) & set(divided[Part.HELD_OUT])


@given(text=st.text(min_size=2, max_size=300), held_out=st.floats(0.001, 0.999))
def test_a_single_document_is_divided_into_two_pieces(text, held_out):
    divided = parts([text], held_out)
    assert divided[Part.TRAIN][0] + divided[Part.HELD_OUT][0] == text
    assert divided[Part.TRAIN][0] and divided[Part.HELD_OUT][0]


def test_of_few_documents_the_longest_gives_its_end_whatever_the_order():
    documents = ["short", "b" * 100, "a" * 100, "tiny"]
    one, other = parts(documents, 0.05), parts(documents[::-1], 0.05)
    assert one[Part.HELD_OUT] == other[Part.HELD_OUT] == ["b" * 5]
    assert sorted(one[Part.TRAIN]) == sorted(["short", "b" * 95, "a" * 100, "tiny"])


def test_a_sample_of_the_training_text_has_about_the_size_asked_for():
    documents = many(2000)
    split = plan_split(documents, 0.2, "here")
    sample = list(split.sample(documents, 10_000))
    assert 7_000 < sum(map(len, sample)) < 13_000
    assert set(sample) < set(parts(documents)[Part.TRAIN])
    assert list(split.sample(documents, 10**9)) == parts(documents)[Part.TRAIN]


@pytest.mark.parametrize("documents", [[], ["x"]])
def test_no_text_is_refused(documents):
    with pytest.raises(UsageError, match="here holds no text"):
        plan_split(documents, 0.1, "here")
