"""Near-duplicate documents: similarity, kept documents and the report."""

import json
import random
import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from unittest.mock import Mock

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from thrifty.cli.data import command
from thrifty.core.errors import UsageError
from thrifty.core.recipe import DataSettings, ObjectiveSettings
from thrifty.data.text import near_duplicates
from thrifty.data.text.near_duplicates import (
    DeduplicatedSource,
    DuplicatePair,
    KeptDocuments,
    difference,
    runs_of_words,
)
from thrifty.data.text.text_data import open_mixture
from thrifty.data.text.token_cache import open_token_cache
from thrifty.data.train_split import DataSplit
from thrifty.recipes import RECIPES
from thrifty.training.data_opening import open_examples

WORDS = [f"{first}{second}" for first in "bdfgklmnprst" for second in ("ab", "eck", "im", "ort", "uss")]


def made_up(words: int, seed: int) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choices(WORDS, k=words))


def with_words_changed(text: str, count: int, seed: int = 0) -> str:
    words = text.split()
    for place in random.Random(seed).sample(range(len(words)), count):
        words[place] = "changed"
    return " ".join(words)


def jaccard(one: str, other: str) -> float:
    """Return the Jaccard similarity by its definition, with sets of tuples."""
    sets = []
    for text in (one, other):
        words = re.findall(r"\w+", text.lower())
        sets.append({tuple(words[place : place + 5]) for place in range(max(1, len(words) - 4))})
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


class Given:
    """A source of a list of documents."""

    def __init__(self, *texts: str):
        self.texts = texts

    def documents(self):
        return iter(self.texts)

    def identity(self) -> str:
        return str(self.texts)


def find_alike(texts: Iterable[str], threshold: float) -> tuple[DuplicatePair, ...]:
    return KeptDocuments(threshold).add(Given(*texts))


@settings(max_examples=40, deadline=None)
@given(st.integers(5, 80), st.integers(5, 80), st.integers(0, 99))
def test_ngrams_overlap_like_sets_of_tuples(length: int, other_length: int, seed: int) -> None:
    one = made_up(length, seed)
    other = f"{' '.join(one.split()[: length // 2])} {made_up(other_length, seed + 1)}"
    runs = [set(runs_of_words(text).tolist()) for text in (one, other)]
    assert len(runs[0] & runs[1]) / len(runs[0] | runs[1]) == pytest.approx(jaccard(one, other), abs=1e-9)


def test_words_are_compared_without_case_and_punctuation() -> None:
    assert (
        runs_of_words("One two, three!\nFOUR five six").tolist()
        == runs_of_words("one Two three four-five(six)").tolist()
    )
    assert runs_of_words("one two").tolist() != runs_of_words("two one").tolist()


def test_script_without_spaces_is_compared_by_characters() -> None:
    text = "吾輩は猫である名前はまだ無いどこで生れたか頓と見当がつかぬ"
    assert len(runs_of_words(text)) == len(text) - 4


@pytest.mark.parametrize("text", ["word", "a few words", "?!", "((()))"])
def test_text_with_few_words_is_one_ngram(text: str) -> None:
    assert len(runs_of_words(text)) == 1
    assert runs_of_words(text).tolist() != runs_of_words("something else").tolist()


def test_estimates_equal_jaccard_within_five_standard_errors() -> None:
    for seed in range(12):
        one = made_up(400, seed)
        other = with_words_changed(one, 2 + seed)
        (found,) = find_alike([one, other], 0.3)
        true = jaccard(one, other)
        assert abs(found.similarity - true) < 5 * (true * (1 - true) / 128) ** 0.5 + 1e-9


def test_first_document_of_a_group_is_kept() -> None:
    original = made_up(300, 0)
    close, closer = with_words_changed(original, 4), with_words_changed(original, 1)
    others = [made_up(300, seed) for seed in (5, 6)]
    texts = [others[0], close, original, others[1], closer, original]
    found = find_alike(texts, 0.8)
    assert [(pair.kept, pair.left_out) for pair in found] == [(1, 2), (1, 4), (1, 5)]
    assert list(DeduplicatedSource(Given(*texts), 0.8).documents()) == [others[0], close, others[1]]
    assert found == find_alike(texts, 0.8)


def test_chain_of_similar_documents_is_compared_to_kept_ones() -> None:
    """Each document is similar to the one before it, but the third is not similar to the first, which is kept."""
    words, tail, other = made_up(300, 0).split(), made_up(33, 1).split(), made_up(33, 2).split()
    chain = [" ".join(text) for text in (words, words[:267] + tail, words[:234] + other + tail)]
    assert min(jaccard(chain[0], chain[1]), jaccard(chain[1], chain[2])) > 0.77 > 0.65 > jaccard(chain[0], chain[2])
    assert [(pair.kept, pair.left_out) for pair in find_alike(chain, 0.72)] == [(0, 1)]


def test_almost_all_pairs_above_the_threshold_are_detected() -> None:
    texts = []
    for seed in range(40):
        text = made_up(200, seed)
        texts += [text, with_words_changed(text, 2, seed)]
    alike = [jaccard(texts[place], texts[place + 1]) for place in range(0, 80, 2)]
    assert all(similarity > 0.89 for similarity in alike)
    assert len(find_alike(texts, 0.8)) >= 39


def test_different_texts_are_all_kept() -> None:
    assert not find_alike((made_up(60, seed) for seed in range(150)), 0.5)


def test_report_shows_the_least_similar_pairs() -> None:
    text = made_up(200, 0)
    copies = [with_words_changed(text, count, seed=count) for count in (0, 1, 3)]
    report = DeduplicatedSource(Given(text, *copies), 0.7).report()
    assert report["documents"] == 3 and report["threshold"] == 0.7
    assert report["bytes"] == sum(len(copy.encode()) for copy in copies)
    shown = report["least_alike"]
    assert [pair["similarity"] for pair in shown] == sorted(pair["similarity"] for pair in shown)
    assert "changed" in shown[0]["left_out"] and "changed" not in shown[0]["kept"]
    json.dumps(report)


def test_a_later_source_is_compared_with_kept_documents_only() -> None:
    words, tail, other = made_up(300, 0).split(), made_up(33, 1).split(), made_up(33, 2).split()
    texts = [" ".join(text) for text in (words, words[:267] + tail, words[:234] + other + tail)]
    first = DeduplicatedSource(Given(*texts[:2]), 0.72)
    later = DeduplicatedSource(Given(*texts[1:]), 0.72, first)
    assert list(later.documents()) == texts[2:] and list(first.documents()) == texts[:1]
    assert list(DeduplicatedSource(Given(*texts[1:]), 0.72, Given(*texts[:2])).documents()) == []
    [shown] = later.report()["least_alike"]
    assert shown == difference(texts[0], texts[1], shown["similarity"])


def test_report_reads_only_sources_of_the_shown_pairs() -> None:
    read: list[str] = []

    class Recorded(Given):
        def documents(self):
            for text in self.texts:
                read.append(text)
                yield text

    first, second, third = ([made_up(50, seed) for seed in range(start, start + 3)] for start in (0, 10, 20))
    source = DeduplicatedSource(Recorded(*first), 0.8)
    source = DeduplicatedSource(Recorded(*second), 0.8, source)
    source = DeduplicatedSource(Recorded(second[0], *third), 0.8, source)
    assert list(source.documents()) == third
    read.clear()
    assert source.report()["bytes"] == len(second[0].encode()) and read == [second[0]] * 2


def test_a_source_that_changes_before_the_next_is_refused() -> None:
    first = Given(made_up(50, 0))
    earlier = DeduplicatedSource(first, 0.8)
    later = DeduplicatedSource(Given(made_up(50, 1)), 0.8, earlier)
    assert list(earlier.documents()) == list(first.texts)
    first.texts = (made_up(50, 1),)
    with pytest.raises(UsageError, match="a source changed after"):
        later.documents()


def test_two_texts_are_shown_around_their_first_difference() -> None:
    same = "x" * 100
    found = difference(f"{same}left", f"{same}right", 0.5)
    assert found == {"similarity": 0.5, "kept": "x" * 40 + "left", "left_out": "x" * 40 + "right"}


@pytest.fixture
def copied(tmp_path, cache):
    """Source of sixty texts, followed by a slightly changed copy of each of the first twenty."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for seed in range(60):
        (folder / f"a{seed:02}.txt").write_text(made_up(120, seed))
    for seed in range(20):
        (folder / f"b{seed:02}.txt").write_text(with_words_changed(made_up(120, seed), 1))
    return folder


def chosen(folder, **changes) -> DataSettings:
    return replace(DataSettings(source=str(folder), vocabulary=300, held_out=0.3), **changes)


def test_no_near_duplicate_is_on_both_sides_of_the_split(copied) -> None:
    printed: list[str] = []
    plain = open_token_cache(chosen(copied), printed.append)
    distinct = open_token_cache(chosen(copied, near_duplicates=0.8), printed.append)
    assert plain.folder != distinct.folder
    assert sum(plain.manifest["documents"].values()) == 80 and "near_duplicates" not in plain.manifest
    assert sum(distinct.manifest["documents"].values()) == 60
    assert distinct.manifest["near_duplicates"]["documents"] == 20
    assert straddling(copied, plain) > 0 and straddling(copied, distinct) == 0


def straddling(folder, prepared) -> int:
    """Return the number of pairs of files that are on different sides."""
    ends = prepared.tokenizer.end_of_text
    sides = {}
    for part in DataSplit:
        tokens, start = prepared.tokens(part).tolist(), 0
        for place, token in enumerate(tokens):
            if token == ends:
                sides[prepared.tokenizer.decode(tokens[start:place])] = part
                start = place + 1
    pairs = [[(folder / f"{letter}{seed:02}.txt").read_text() for letter in "ab"] for seed in range(20)]
    return sum(one in sides and other in sides and sides[one] != sides[other] for one, other in pairs)


def test_a_held_out_file_is_not_repeated_in_training(copied, tmp_path) -> None:
    held_out = tmp_path / "held_out"
    held_out.mkdir()
    for seed in range(5):  # two versions of each text
        for changes in (2, 3):
            (held_out / f"{seed}-{changes}.txt").write_text(with_words_changed(made_up(120, seed), changes, seed=9))
    prepared = open_token_cache(chosen(copied, near_duplicates=0.5, held_out_source=str(held_out)), lambda text: None)
    assert prepared.manifest["documents"] == {"train": 55, "held_out": 10}
    report = prepared.manifest["near_duplicates"]
    assert report["documents"] == 25 and len(report["least_alike"]) == 5
    plain = open_token_cache(chosen(copied, held_out_source=str(held_out)), lambda text: None)
    assert plain.manifest["documents"] == {"train": 80, "held_out": 10}


def test_sources_of_a_mixture_do_not_repeat_one_another(copied, tmp_path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for seed in range(10, 30):  # the first ten are in the first source too
        (other / f"{seed}.txt").write_text(
            with_words_changed(made_up(120, seed if seed < 20 else seed + 500), 1, seed=3)
        )
    mixture = chosen(copied, source="", sources={str(copied): 1.0, str(other): 1.0}, length=8, batch=2)
    printed: list[str] = []
    plain, distinct = (
        open_mixture(replace(mixture, near_duplicates=share), 0, printed.append) for share in (None, 0.8)
    )
    documents = [tokens.train_tokens + tokens.held_out_tokens for tokens in (plain, distinct)]
    assert documents[1] == pytest.approx(documents[0] * 70 / 100, rel=0.1)  # 30 of 100 documents are left out


@pytest.mark.parametrize("cached", [False, True])
def test_each_document_of_a_mixture_is_hashed_once(copied, tmp_path, monkeypatch, cached: bool) -> None:
    folders = [copied, tmp_path / "b", tmp_path / "c"]
    for number, folder in enumerate(folders[1:], start=1):
        folder.mkdir()
        for seed in range(30):
            (folder / f"{seed}.txt").write_text(made_up(120, seed + 500 * number))
    mixture = chosen("", sources={str(folder): 1.0 for folder in folders}, length=8, batch=2, near_duplicates=0.8)
    if cached:
        open_token_cache(replace(mixture, source=str(copied), sources={}), lambda text: None)
    hashed = Mock(side_effect=runs_of_words)
    monkeypatch.setattr(near_duplicates, "runs_of_words", hashed)
    data = open_mixture(mixture, 0, lambda text: None)
    assert hashed.call_count == 140
    assert open_mixture(mixture, 0, lambda text: None).identity == data.identity and hashed.call_count == 140


def test_each_threshold_has_its_own_cache_entry(copied) -> None:
    printed: list[str] = []
    folders = [
        open_token_cache(chosen(copied, near_duplicates=share), printed.append).folder for share in (0.8, 0.9, 0.8)
    ]
    assert folders[0] == folders[2] != folders[1]
    assert len(printed) == 2


def test_pairs_of_texts_are_compared_as_a_whole(tmp_path, cache) -> None:
    rows = [{"source": made_up(30, seed), "target": made_up(30, seed + 500)} for seed in range(40)]
    rows.append({"source": rows[3]["source"], "target": rows[3]["target"].upper()})
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepared = open_token_cache(chosen(path, near_duplicates=0.8), lambda text: None, pairs=True)
    assert prepared.manifest["near_duplicates"]["documents"] == 1


def test_look_shows_left_out_documents(copied) -> None:
    options = ["look", str(copied), "--vocabulary", "300", "--held-out", "0.3", "--near-duplicates", "0.8"]
    output = CliRunner().invoke(command, options, catch_exceptions=False).stdout
    assert re.search(
        r"near-duplicates  20 documents, [\d.]+ kB dropped, at least 80.0 % similar to an earlier one", output
    )
    assert output.count("% similar\n") == 5 and "changed" in output
    plain = CliRunner().invoke(command, options[:-2], catch_exceptions=False).stdout
    assert "near-duplicates" not in plain


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5])
def test_threshold_outside_zero_to_one_is_refused(copied, share: float) -> None:
    with pytest.raises(UsageError, match="data: near_duplicates is"):
        open_token_cache(chosen(copied, near_duplicates=share), lambda text: None)


def test_error_without_datasketch_names_the_package(copied, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(UsageError, match=r"thrifty\[duplicates\]"):
        open_token_cache(chosen(copied, near_duplicates=0.8), lambda text: None)
    assert open_token_cache(chosen(copied), lambda text: None).manifest["documents"]


@pytest.mark.parametrize("objective", ["classification", "chat_answers"])
def test_near_duplicates_require_plain_text(objective: str) -> None:
    recipe = RECIPES["vit-digits"]()
    given = replace(recipe, objective=ObjectiveSettings(objective), data=replace(recipe.data, near_duplicates=0.8))
    with pytest.raises(UsageError, match=f"for plain text, but {objective} learns from other data"):
        open_examples(given)
