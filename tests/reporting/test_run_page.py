import json
import os
import re
import shutil
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import altair as alt
import pytest

from thrifty.core.errors import UsageError
from thrifty.reporting.color_theme import DARK, LIGHT
from thrifty.reporting.key_figures import key_figures
from thrifty.reporting.run_charts import figures
from thrifty.reporting.run_page import render, write_report
from thrifty.reporting.run_record import read_run

HOSTILE = "</script><img src=x onerror=alert(1)>{{ 7*7 }}\"'<!--"
PLANTED = "hf_aB3dE5gH7jK9mN1pQ3sT5vX7z"
CHARTS = {"loss", "throughput", "learning_rate", "gradient_norm", "memory"}


class Reader(HTMLParser):
    """Parser of a page: tags, visible text, and JSON of the charts."""

    def __init__(self, page: Path):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.json, self.inside = "", "", ""
        self.feed(page.read_text())

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.inside = "json" if ("type", "application/json") in attributes else tag

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        if self.inside == "json":
            self.json += data
        elif self.inside not in ("script", "style"):
            self.text += data


def page_alone(folder: Path) -> Path:
    """Write the page without chart images, which take most of the time."""
    record = read_run(folder)
    page = folder / "report.html"
    page.write_text(render(record, figures(record, key_figures(record))))
    return page


def test_the_page_and_its_pictures_are_written(standard_page):
    assert standard_page.name == "report.html" and set(json.loads(Reader(standard_page).json)["specs"]) == CHARTS
    pictures = list((standard_page.parent / "plots").iterdir())
    assert {picture.name for picture in pictures} == {f"{chart}.png" for chart in CHARTS}
    for picture in pictures:
        content = picture.read_bytes()
        assert content.startswith(b"\x89PNG") and int.from_bytes(content[16:20], "big") > 1000
    assert not list(standard_page.parent.glob(".*")), "no temporary file is left"


def test_the_page_shows_the_results_of_the_run(standard_page):
    text = Reader(standard_page).text
    for expected in (
        "finished",
        "below the unigram entropy of 5.94",
        "nats per token",
        "bits per byte",
        "276 MB",
        "predicted 263 MB, 4.7 % too low",
        "memory.recompute",
        "611 MB → 221 MB (×0.362)",
        "246 GFLOP → 327 GFLOP (×1.33)",
        "48 of 49 linears matched; skipped head: tied",
        "growth.stacking: 3 to 6 blocks",
        "2.13.0+cpu",
        "recipe kjv",
        "thrifty train runs/kjv/recipe.toml",
        "thrifty train kjv --set model.depth=6 --with memory.recompute:every=1",
        'preset = "llama-nano"',
    ):
        assert expected in text, expected


def test_no_tag_refers_to_anything_outside_the_page(standard_page):
    for tag, attributes in Reader(standard_page).tags:
        assert tag not in {"link", "iframe", "object", "embed", "base", "form", "img"}
        assert "src" not in attributes and attributes.get("href", "#").startswith("#")
    policies = [attributes["content"] for _, attributes in Reader(standard_page).tags if "http-equiv" in attributes]
    assert len(policies) == 1 and "default-src 'none'" in (policies[0] or "")
    outside_vega = re.sub(r"<script>.*?</script>", "", standard_page.read_text(), flags=re.DOTALL)
    assert "//" not in outside_vega.replace("<!doctype", "")


def hostile(value):
    """Return a JSON value whose texts try to escape from their HTML elements."""
    if isinstance(value, dict):
        return {key: hostile(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [hostile(inner) for inner in value]
    return HOSTILE if isinstance(value, str) else value


def test_every_text_of_a_run_is_escaped(write_run):
    clean = write_run("clean", steps=60)
    names = ("environment", "explanation", "origins", "summary")
    files = {name: hostile(json.loads((clean / f"{name}.json").read_text())) for name in names}
    files["environment"][HOSTILE] = HOSTILE
    records = [json.loads(line) for line in (clean / "records.jsonl").read_text().splitlines()]
    files["records"] = [{**hostile(record), "kind": record["kind"]} for record in records]
    files["recipe"] = (clean / "recipe.toml").read_text().replace('"llama-nano"', json.dumps(HOSTILE))

    reader = Reader(page_alone(write_run("<b onclick=alert(1)>", **files)))
    expected = Reader(page_alone(clean)).tags
    one_more_row = ["tr", "td", "td"]
    assert sorted(tag for tag, _ in reader.tags) == sorted([tag for tag, _ in expected] + one_more_row)
    assert {name for _, attributes in reader.tags for name in attributes} <= {n for _, a in expected for n in a}
    assert reader.text.count(HOSTILE) > 30
    assert json.dumps(HOSTILE) in json.dumps(json.loads(reader.json))


def test_secrets_are_redacted(write_run):
    environment = {"command": ["thrifty", "train", "--token", "open-sesame", f"x={PLANTED}"], "HF_TOKEN": "open-sesame"}
    records = [
        {"kind": "step", "step": 1, "loss": 3.0},
        {"kind": "notice", "step": 1, "text": f"login with {PLANTED}"},
        {"kind": "change", "step": 1, "technique": PLANTED, "reason": "password=open-sesame"},
    ]
    recipe = f'about = "{PLANTED}"\n[hub]\ntoken = "open-sesame"\n'
    origins = {"hub.token": "--set hub.token=open-sesame"}
    explanation = {"techniques": [{"name": "x", "settings": {"api_key": "open-sesame"}, "touched": [PLANTED]}]}
    page = page_alone(
        write_run(environment=environment, records=records, recipe=recipe, origins=origins, explanation=explanation)
    )
    html = page.read_text()
    assert "open-sesame" not in html and PLANTED not in html
    assert "[redacted]" in html


@pytest.mark.sampled(3)
@pytest.mark.parametrize("missing", ["recipe", "origins", "environment", "explanation", "records", "summary"])
def test_any_one_file_may_be_missing(write_run, missing):
    text = Reader(page_alone(write_run(steps=60, **{missing: None}))).text
    assert "Techniques" in text and "Environment" in text
    assert "None" not in text and "nan" not in text.split()


def test_a_run_without_steps_has_a_report(write_run):
    nothing = dict.fromkeys(["origins", "environment", "explanation", "records", "summary"])
    text = Reader(page_alone(write_run(**nothing))).text
    assert "not started" in text and "No steps have been recorded yet." in text


@pytest.mark.parametrize("wrong", [{}, {"techniques": 1, "footprint": "x", "status": 3, "steps": "many", "command": 4}])
def test_values_of_a_wrong_type_are_tolerated(write_run, wrong):
    wrong = {**wrong, "memory": "16 GB", "held_out_loss": None, "unigram_entropy": [], "peak_memory": "much"}
    records = [{"kind": "step", "step": 1, "loss": "low"}, {"kind": "checkpoint", "step": 1.0}, {"kind": [], "step": 1}]
    files = dict.fromkeys(["origins", "environment", "explanation", "summary"], wrong)
    text = Reader(page_alone(write_run(records=records, recipe="about = 3\n", **files))).text
    assert "16 GB" in text and "Nothing has been measured on held-out text yet." in text


def test_skipped_steps_without_a_finite_loss_are_counted(write_run):
    records = [
        {"kind": "step", "step": step, "loss": float("nan") if step % 3 else 4.0, "skipped": step % 3 > 0}
        for step in range(1, 61)
    ]
    text = Reader(page_alone(write_run(records=records, summary=None))).text
    assert "40 skipped" in text


def with_changed_records(folder, change):
    """Apply a function to each record of the run."""
    path = folder / "records.jsonl"
    records = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_averaged_and_raw_weights_are_both_shown(write_run):
    def judged(record):
        return record | {"trained_loss": 7.375} if record["kind"] == "evaluation" and record["step"] > 60 else record

    reader = Reader(page_alone(with_changed_records(write_run(steps=120), judged)))
    assert "Held-out, weights in training" in reader.text and "7.38" in reader.text
    spec = json.dumps(json.loads(reader.json)["specs"]["loss"])
    assert spec.count("held-out, weights in training") > 1 and "7.375" in spec
    summaries = [attributes["aria-label"] or "" for _, attributes in reader.tags if "aria-label" in attributes]
    assert any("Held-out loss of the weights in training ends at 7.38." in summary for summary in summaries)


def test_no_average_is_mentioned_without_averaging(standard_page):
    assert "weights in training" not in Reader(standard_page).text


def test_a_measured_noise_scale_has_a_tile_and_a_curve(write_run):
    def noted(record):
        return record | {"notes": {"noise_scale": 2.0 * record["step"]}} if record["kind"] == "step" else record

    reader = Reader(page_alone(with_changed_records(write_run(steps=120), noted)))
    assert "Gradient noise scale" in reader.text and "much larger batches gain little" in reader.text
    assert "240" in reader.text and set(json.loads(reader.json)["specs"]) == CHARTS | {"noise_scale"}


@pytest.mark.slow
def test_a_long_run_stays_a_small_page_and_keeps_its_spike(write_run):
    folder = write_run(steps=100_000)
    spike = {"kind": "step", "step": 54_321, "loss": 77.125, "skipped": False}
    with (folder / "records.jsonl").open("a") as file:
        file.write(json.dumps(spike) + "\n")
    page = page_alone(folder)
    assert page.stat().st_size <= 2_000_000
    assert '{"step":54321,"value":77.125}' in Reader(page).json.replace(" ", "")
    assert "77.1" in Reader(page).text


def test_every_chart_matches_the_altair_schema(write_run):
    record = read_run(write_run(steps=60))
    drawn = figures(record, key_figures(record))
    assert {figure.id for figure in drawn} >= CHARTS
    for figure in drawn:
        alt.LayerChart.from_dict(figure.whole)


def test_the_same_folder_gives_the_same_page(write_run, tmp_path):
    folder = write_run(steps=60)
    first = page_alone(folder).read_bytes()
    other = tmp_path / "another" / "runs" / "kjv"
    shutil.copytree(folder, other)
    assert page_alone(other).read_bytes() == first


def test_headings_landmarks_and_charts_are_accessible(standard_page):
    tags = Reader(standard_page).tags
    names = [tag for tag, _ in tags]
    levels = [int(name[1]) for name in names if re.fullmatch("h[1-6]", name)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(later <= earlier + 1 for earlier, later in pairwise(levels))
    assert [names.count(landmark) for landmark in ("header", "nav", "main", "footer")] == [1, 1, 1, 1]
    images = [attributes for tag, attributes in tags if attributes.get("role") == "img"]
    assert len(images) == len(CHARTS) and all("step" in (image["aria-label"] or "") for image in images)
    assert names.count("table") == names.count("caption") >= len(CHARTS) + 4
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def luminance(colour: str) -> float:
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("ground", ["ground", "surface"])
def test_text_and_curves_reach_the_contrast_of_wcag_aa(palette, ground):
    for name in ("ink", "muted", "accent", "good", "bad"):
        assert contrast(palette[name], palette[ground]) >= 4.5, name
    for name in ("train", "held-out", "trained", "control"):
        assert contrast(palette[name], palette[ground]) >= 3.0, name


@pytest.mark.parametrize("name", ["recipe.toml", "plots", "environment.json"])
def test_a_run_folder_with_links_is_refused(name, write_run, tmp_path):
    run, outside = write_run(), tmp_path / "outside"
    outside.mkdir()
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(outside)
    with pytest.raises(UsageError, match=f"{name}' is a symbolic link"):
        write_report(run)
    assert not [*outside.iterdir()] and not (run / "report.html").exists()


def test_a_report_never_writes_through_links(write_run, tmp_path):
    run, precious = write_run(), tmp_path / "precious"
    precious.write_text("precious")
    (run / "plots").mkdir()
    for name in ("report.html", f".report.html.{os.getpid()}", "plots/loss.png"):
        os.link(precious, run / name)
    (run / "plots" / "rate.png").symlink_to(precious)
    write_report(run)
    assert precious.read_text() == "precious"


def test_an_extended_run_is_repeated_by_its_commands(write_run):
    steps = [{"kind": "step", "step": step, "loss": 4.0} for step in (1, 2, 3)]
    asked = {"kind": "length", "step": 2, "steps": 3, "asked": "+1steps", "extended": {"steps": 3}}
    estimated = {"kind": "length", "step": 1, "steps": 2, "used": 3.0, "budget": 9.0}
    text = Reader(page_alone(write_run(records=[*steps[:2], asked, estimated, steps[2]]))).text
    assert "resumed with a budget extended by 1steps" in text and "thrifty resume kjv --budget +1steps" in text
    assert text.count("resumed with a budget") == 1
    assert "The budget was extended" not in Reader(page_alone(write_run(name="plain"))).text
