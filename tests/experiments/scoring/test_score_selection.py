"""Kept examples per label, and the review page, also in a real browser without a network."""

import base64
import re
import shlex
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from drawn_pages import CHROMIUM, SCHEMES, drawn, probed
from PIL import Image
from tiny_recipes import digits, text

from thrifty.core.batches import ExampleSubset
from thrifty.core.errors import RefusedError
from thrifty.core.score_file import ExampleScores
from thrifty.data.example_previews import selection
from thrifty.data.images.digits import DigitImages
from thrifty.data.images.image_previews import picture, png
from thrifty.data.run_data import RunData
from thrifty.experiments.scoring.example_scoring import ScoringSettings, score
from thrifty.experiments.scoring.review_page import open_scored, page, suspicious
from thrifty.experiments.scoring.score_selection import LabelCount, changed_settings, count_labels, format_option
from thrifty.recipes.recipe_layers import RecipeLayers
from thrifty.techniques.data_selection.prune import PrunedExamples
from thrifty.training.data_opening import open_examples


@pytest.fixture(scope="module")
def looked_at(tmp_path_factory: pytest.TempPathFactory) -> tuple[ExampleScores, RunData]:
    folder = tmp_path_factory.mktemp("scores")
    return score(digits(), ScoringSettings(runs=1, steps=1.0), folder / "scores")[0], open_examples(digits())[1]


def pixels_of(address: str) -> np.ndarray:
    return np.array(Image.open(BytesIO(base64.b64decode(address.split(",")[1]))))


@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_hold_the_pixels(channels: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, channels)).astype(np.uint8)
    read = np.array(Image.open(BytesIO(png(pixels))))
    assert np.array_equal(read.reshape(5, 7, channels), pixels)
    image = torch.from_numpy(pixels).permute(2, 0, 1) / 255
    assert np.array_equal(pixels_of(picture(image)).reshape(5, 7, channels), pixels)
    assert pixels_of(picture(torch.rand(channels, 200, 100))).shape[:2] == (64, 32)


def test_previews_show_the_exact_digits(looked_at: tuple[ExampleScores, RunData]) -> None:
    _, data = looked_at
    found = data.previews([3, 1299, 0])
    stored = DigitImages("train")
    for example, number in zip(found, (3, 1299, 0), strict=True):
        assert example.number == number and example.label == str(int(stored.labels[number]))
        expected = (stored.images[number] * 255).round().numpy().astype(np.uint8)
        assert np.array_equal(pixels_of(example.picture), expected)


def test_previews_show_decoded_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path / "cache"))
    _, data = open_examples(text(tmp_path))
    whole = (tmp_path / "text.txt").read_text()
    assert all(example.text in whole and example.text for example in data.previews([0, 5]))
    scores, _ = score(text(tmp_path), ScoringSettings("loss", runs=1), tmp_path / "scores")
    found = page(scores, data, "text.txt", PrunedExamples(keep=0.3))
    assert "<pre" in found and "Most likely mislabelled" not in found and "Highest scores" in found


def test_kept_counts_by_label_add_up(looked_at: tuple[ExampleScores, RunData]) -> None:
    scores, _ = looked_at
    kept = PrunedExamples(keep=0.25).kept(scores.scores, scores.labels)
    rows = count_labels(scores, kept)
    assert [row.label for row in rows] == list("0123456789")
    assert sum(row.there for row in rows) == 1300 and sum(row.kept for row in rows) == 325
    assert min(row.kept for row in rows) >= 16
    unlabelled = ExampleScores(scores.scores, scores.runs, scores.facts)
    assert count_labels(unlabelled, kept) == [LabelCount("", 1300, 325)]


@pytest.mark.parametrize("sha256", ["f" * 64, "27aa" * 16, "1e5" + "0" * 61])
def test_the_printed_option_parses_to_the_same_selection(sha256: str) -> None:
    chosen = PrunedExamples(scores="/a b/it's.scores", sha256=sha256, keep=0.5, drop_hardest=0.1, order="easy")
    assert changed_settings(chosen).keys() == {"scores", "sha256", "drop_hardest", "order"}
    (words,) = shlex.split(format_option(chosen))
    assert RecipeLayers().add_technique(words).recipe().techniques == (chosen,)


def test_suspicious_examples_are_ordered_by_confidence(looked_at: tuple[ExampleScores, RunData]) -> None:
    scores, _ = looked_at
    guesses, labels = scores.guesses, scores.labels
    assert guesses is not None and labels is not None
    found = suspicious(scores)
    assert set(found.tolist()) == set((guesses.predicted != labels).nonzero().squeeze(1).tolist())
    lead = (guesses.confidence - guesses.own)[found]
    assert (lead[:-1] >= lead[1:]).all() and lead[-1] > 0


def test_the_page_shows_suspicious_hardest_and_easiest_examples(looked_at: tuple[ExampleScores, RunData]) -> None:
    scores, data = looked_at
    found = page(scores, data, "digits", PrunedExamples(keep=0.5, drop_hardest=0.05))
    order = scores.scores.argsort(descending=True)
    for example in data.previews([*suspicious(scores)[:5].tolist(), *order[:5].tolist(), *order[-5:].tolist()]):
        assert example.picture in found
    first = data.previews(suspicious(scores)[:1].tolist())[0]
    assert scores.guesses is not None
    assert f"{first.label}, or {int(scores.guesses.predicted[first.number])}?" in found
    for words in ("Most likely mislabelled", "650 of 1,300 examples are kept", "Left out, with the highest scores"):
        assert words in found
    assert not re.search(r"(src|href)=\"https?:", found) and "<script" not in found
    assert "Kept and left out" not in page(scores, data, "digits")
    assert page(scores, data, "digits") == page(scores, data, "digits")


def test_scores_of_other_data_are_refused(looked_at: tuple[ExampleScores, RunData], tmp_path: Path) -> None:
    scores, _ = looked_at
    for number in range(40):
        path = tmp_path / "images" / str(number % 2) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), 6 * number).save(path)
    recipe_batch = {**scores.facts.recipe, "data": {**scores.facts.recipe["data"], "batch": 4}}
    other = ExampleScores(
        scores.scores, scores.runs, type(scores.facts)("el2n", scores.facts.fingerprint, recipe_batch)
    )
    with pytest.raises(RefusedError, match="scores belong to 1,300 examples, but") as error:
        open_scored(other, str(tmp_path / "images"), lambda text: None)
    assert "digits" in error.value.fix
    assert open_scored(scores, "digits").train.example_index().fingerprint == scores.facts.fingerprint


def test_a_selection_shows_kept_and_left_out_examples(looked_at: tuple[ExampleScores, RunData]) -> None:
    scores, data = looked_at
    kept = PrunedExamples(keep=0.25, drop_hardest=0.1).kept(scores.scores, scores.labels)
    found = selection(data, ExampleSubset(kept, scores.scores))
    assert (found["examples"], found["kept"]) == (1300, 325)
    assert sum(row[1] for row in found["labels"]) == 1300 and sum(row[2] for row in found["labels"]) == 325
    for name, own in (("kept", set(kept.tolist())), ("left out", set(range(1300)) - set(kept.tolist()))):
        cards = found["shown"][name]
        by_score = sorted(own, key=lambda number: -float(scores.scores[number]))
        assert {each["number"] for each in cards} <= own
        expected = [float(scores.scores[number]) for number in (*by_score[:12], *by_score[-12:])]
        assert [each["score"] for each in cards] == expected and all(each["picture"] for each in cards)
    without = selection(data, ExampleSubset(kept))["shown"]["kept"]
    assert len(without) == 24 and all(each["score"] is None for each in without)


needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="chromium is not on PATH (Debian: apt-get install chromium)"
)


@pytest.mark.sampled(1)
@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pictures_are_drawn_in_both_schemes_without_a_network(
    looked_at: tuple[ExampleScores, RunData], tmp_path: Path, scheme: str
) -> None:
    path = tmp_path / "page.html"
    path.write_text(page(*looked_at, "digits", PrunedExamples()), encoding="utf-8")
    script = "[...document.querySelectorAll('.gallery img')].filter(each => each.naturalWidth == 8).length + ';'"
    script += " + document.querySelectorAll('.gallery img').length + ';' + document.documentElement.scrollWidth + ';'"
    script += " + innerWidth + ';' + getComputedStyle(document.body).backgroundColor"
    dom = drawn(probed(path, script, tmp_path / "profile"), tmp_path / "profile", scheme, "500,900")
    (title,) = re.findall(r"<title>probe:(.*?)</title>", dom)
    whole, pictures, scrolled, inner, ground = title.split(";")
    assert whole == pictures and int(pictures) > 70
    assert int(scrolled) <= int(inner)
    colour = SCHEMES[scheme][1]["ground"]
    assert ground == f"rgb{tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))}"


@needs_browser
def test_hostile_names_run_nothing(looked_at: tuple[ExampleScores, RunData], tmp_path: Path) -> None:
    attack = "</title><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    path = tmp_path / "page.html"
    path.write_text(page(*looked_at, attack), encoding="utf-8")
    assert "<title>owned" not in drawn(path, tmp_path / "profile")
