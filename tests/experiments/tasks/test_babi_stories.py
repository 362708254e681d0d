"""Generated stories: answers checked by an independent reader, determinism, and disjoint splits."""

from collections import Counter

import numpy as np
import pytest

from thrifty.experiments.tasks.babi_stories import (
    KINDS,
    NUMBERS,
    PLACES,
    SENTENCES,
    WORDS,
    BabiStory,
    make_stories,
    story,
)

NUMBER = 300


def answers(each: BabiStory) -> set[str]:
    """Return all answers that follow from the sentences, read word by word. More than one is an error."""
    where: dict[str, str] = {}
    has: dict[str, list[str]] = {}
    been: dict[str, list[str]] = {}
    gave: dict[tuple[str, str], str] = {}
    for sentence in each.sentences:
        who, verb, *rest = sentence.split()
        if verb in ("went", "walked", "came"):
            where[who] = rest[-1]
            for thing in has.get(who, []):
                been[thing].append(rest[-1])
        elif verb in ("took", "picked"):
            assert all(rest[-1] not in carried for carried in has.values())
            assert been.setdefault(rest[-1], [where[who]])[-1] == where[who]
            has.setdefault(who, []).append(rest[-1])
        elif verb in ("dropped", "put"):
            has[who].remove(rest[-1])
        else:
            thing, other = rest[1], rest[-1]
            assert verb in ("gave", "handed") and where[who] == where[other]
            has[who].remove(thing)
            has.setdefault(other, []).append(thing)
            gave[thing, other] = who
    words = each.question.split()
    if words[0] == "is":
        return {"yes" if where[words[1]] == words[-1] else "no"}
    if words[0] == "how":
        return {NUMBERS[len(has.get(words[-1], []))]}
    if words[:2] == ["who", "has"]:
        return {who for who, carried in has.items() if words[-1] in carried}
    if words[0] == "who":
        return {gave[words[3], words[-1]]}
    if "before" in words:
        visited = been[words[3]]
        return {visited[i - 1] for i in range(1, len(visited)) if visited[i] == words[-1]}
    return {where[words[-1]] if words[2] != "the" else been[words[-1]][-1]}


@pytest.mark.parametrize("number", range(0, NUMBER, 20))
def test_each_answer_follows_from_the_sentences(number: int) -> None:
    for each in (story(1, i) for i in range(number, number + 20)):
        assert answers(each) == {each.answer}, each
        assert 4 <= len(each.sentences) <= SENTENCES


def test_questions_and_answers_are_balanced() -> None:
    stories = [story(0, i) for i in range(7 * 60)]
    assert Counter(each.kind for each in stories) == dict.fromkeys(KINDS, 60)
    assert 17 < np.mean([len(each.sentences) for each in stories]) < 23
    yes = [each.answer == "yes" for each in stories if each.kind == "yes or no"]
    assert 0.3 < np.mean(yes) < 0.7
    places = Counter(each.answer for each in stories if each.kind == "where a person is")
    assert set(places) == set(PLACES) and max(places.values()) < 20


def test_splits_are_disjoint_and_deterministic() -> None:
    training, held_out = make_stories(80, False), make_stories(20, True)
    assert len(training) == 80 and len(held_out) == 20
    rows = [{(*each.flatten().tolist(),) for each in part.inputs} for part in (training, held_out)]
    assert not rows[0] & rows[1]
    again = make_stories(90, False)
    assert np.array_equal(again.inputs[:80], training.inputs) and np.array_equal(again.labels[:80], training.labels)
    assert not np.array_equal(make_stories(80, False, seed=1).inputs, training.inputs)


def test_inputs_are_word_indices_with_the_question_last() -> None:
    number = next(i for i in range(50) if not story(0, i).is_held_out)
    each, found = story(0, number), make_stories(1, False)
    spelled = [" ".join(WORDS[word] for word in row if word) for row in found.inputs[0]]
    assert spelled[: len(each.sentences)] == list(each.sentences) and spelled[-1] == each.question
    assert not any(spelled[len(each.sentences) : -1])
    assert WORDS[found.labels[0]] == each.answer and KINDS[found.kinds[0]] == each.kind
    fields = found.fields(np.array([0, 0]))
    assert fields["inputs"].shape == (2, SENTENCES + 1, 7) and fields["labels"].tolist() == [found.labels[0]] * 2
