"""The section of a report on kept training examples."""

import json

from thrifty.reporting.example_gallery import card, groups, kept_by_label, rows
from thrifty.reporting.run_page import render
from thrifty.reporting.run_record import read_run

PICTURE = "data:image/png;base64,iVBORw0KGgo="
SELECTION = {
    "examples": 1300,
    "kept": 650,
    "labels": [["zero", 130, 32], ["one", 140, 0]],
    "shown": {
        "kept": [{"number": 7, "picture": PICTURE, "label": "zero", "score": 0.5, "text": "", "file": ""}],
        "left out": [{"number": 9, "picture": "", "label": "", "score": None, "text": "a window", "file": "x/9.txt"}],
    },
}


def rendered(folder):
    """Return the page without its charts, which are slow to draw."""
    return render(read_run(folder), [])


def written(write_run, selection):
    folder = write_run()
    (folder / "selection.json").write_text(json.dumps(selection))
    return rendered(folder)


def test_kept_and_left_out_examples_are_in_the_report(write_run):
    page = written(write_run, SELECTION)
    assert '<h2 id="examples">Examples</h2>' in page and '<a href="#examples">' in page
    assert f'<img src="{PICTURE}" alt="zero"' in page and "a window" in page and "x/9.txt" in page
    assert "650 of 1,300 training examples are kept" in page
    assert "img-src data:" in page


def test_a_run_on_all_examples_has_no_examples_section(write_run):
    page = rendered(write_run())
    assert 'id="examples"' not in page and "gallery" not in page.split("</style>")[1]


def test_labels_show_the_fraction_kept():
    table = kept_by_label(SELECTION)
    assert table.rows == [("zero", "130", "32", "24.6 %"), ("one", "140", "0", "0.0 %")]


def test_invalid_images_are_dropped_and_secrets_redacted():
    for wrong in ("https://example.com/x.png", "data:text/html;base64,AAAA", 'x" onerror="y'):
        assert card({"number": 1, "picture": wrong}).picture == ""
    assert "hunter2" not in card({"number": 1, "text": "password=hunter2"}).text
    assert len(card({"number": 1, "text": "x" * 10_000}).text) < 500


def test_damaged_selections_are_tolerated(write_run):
    damaged = {"examples": "many", "kept": None, "labels": [1, ["a"]], "shown": {"kept": [3, None]}}
    assert 'id="examples"' in written(write_run, damaged)
    assert groups({"shown": 3}) == [] and groups({}) == []


def test_an_unreadable_file_is_named(write_run):
    folder = write_run()
    (folder / "selection.json").write_text("{")
    assert "selection.json is not valid JSON" in rendered(folder)


SEEN = {
    "step": 1200,
    "about": "Half of <each> is reconstructed.",
    "shown": [
        {"pictures": {"original": PICTURE, "masked & reconstructed": PICTURE}, "loss": 0.3921},
        {"pictures": {"original": PICTURE}, "loss": None},
    ],
}


def with_predictions(write_run, pictures):
    folder = write_run()
    (folder / "pictures.json").write_text(json.dumps(pictures))
    return rendered(folder)


def test_predictions_on_held_out_examples_are_shown_in_rows(write_run):
    page = with_predictions(write_run, SEEN)
    assert '<h2 id="predictions">Predictions</h2>' in page and '<a href="#predictions">' in page
    assert "Half of &lt;each&gt; is reconstructed. Held-out examples after step 1,200." in page
    assert f'<img src="{PICTURE}" alt="Example 1, original"' in page
    assert (
        f'<img src="{PICTURE}" alt="Example 1, masked &amp; reconstructed"' in page
        and 'alt="Example 2, original"' in page
    )
    # once at the top of the page, and once in its section
    assert "loss 0.392" in page and page.count('<p class="remark">loss') == 2


def test_a_run_without_prediction_images_has_no_section(write_run):
    folder = write_run()
    for pictures in ({}, {"step": 1, "about": "", "shown": []}):
        (folder / "pictures.json").write_text(json.dumps(pictures))
        assert 'id="predictions"' not in rendered(folder) and "#predictions" not in rendered(folder)


def test_invalid_image_addresses_and_damaged_files_show_nothing(write_run):
    outside = {"shown": [{"pictures": {"original": "https://example.com/x.png"}}, {"pictures": 3}, 4, {}]}
    assert rows(outside) == rows({"shown": 3}) == rows({"shown": {"a": 1}}) == []
    folder = write_run()
    (folder / "pictures.json").write_text(json.dumps(outside))
    assert "example.com" not in rendered(folder)
    (folder / "pictures.json").write_text("[")
    assert "pictures.json is not valid JSON" in rendered(folder)
