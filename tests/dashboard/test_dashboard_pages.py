"""Content of the board's pages, and protection of other files."""

import json
import os
import re

import pytest

from thrifty.dashboard.board_site import BoardSite, TechniqueEvidence
from thrifty.dashboard.run_listing import entries
from thrifty.dashboard.saved_results import ROWS, tables

ATTACK = "</td><script>alert(1)</script><img src=x onerror=alert(1)>"


def text(site, path, **query):
    answer = site.respond(path, query)
    assert answer.status == 200, (path, answer.body)
    return answer.body.decode()


def told(site, path, **query):
    return json.loads(text(site, path, **query))


def test_runs_are_listed_and_sorted_by_the_query(site, run_folder):
    run_folder("long", steps=240)
    run_folder("short", steps=60)
    page = text(site, "", sort="step")
    assert re.findall(r'<a href="run\?name=(\w+)"', page) == ["long", "short"]
    assert 'aria-sort="descending"><a href="./?sort=step"' in page and "2 runs" in page
    assert re.findall(r'href="run\?name=(\w+)"', text(site, "", sort="name")) == ["long", "short"]
    assert re.findall(r'href="run\?name=(\w+)"', text(site, "", sort="no such column"))


def test_unchanged_parts_are_not_sent_again(site, run_folder):
    folder = run_folder()
    for path, query in (("api/runs", {}), ("api/run", {"name": "kjv"})):
        first = told(site, path, **query)
        assert first["parts"]
        again = told(site, path, **query, have=first["version"])
        assert again["same"] and "parts" not in again
        with (folder / "records.jsonl").open("a") as file:
            file.write(json.dumps({"kind": "step", "step": 500 + len(path), "loss": 1.0}) + "\n")
        assert told(site, path, **query, have=first["version"])["parts"]


def test_a_run_page_shows_all_live_parts(site, run_folder):
    run_folder()
    page, live = text(site, "run", name="kjv"), told(site, "api/run", name="kjv")
    for id in live["parts"]:
        assert f'id="{id}"' in page, id
    assert [figure["id"] for figure in live["figures"]][:2] == ["loss", "memory"]
    loss = live["figures"][0]
    assert len(loss["data"]["smoothed"]["step"]) == len(loss["data"]["smoothed"]["value"]) > 10
    assert "below the unigram entropy" in live["parts"]["verdict"] and "growth.stacking" in live["parts"]["timeline"]
    assert "memory.recompute" in live["parts"]["techniques"] and "AMX bf16" in page


def test_key_figures_of_a_partly_read_run_are_hidden(site, run_folder, monkeypatch):
    run_folder(steps=600)
    entry = site.watch.find("kjv")
    with site.watch.index(entry, 0.0) as index:
        index.tail.chunk = 1 << 12
        index._restarts -= 1  # restart reading in small pieces
        index.tail.offset = 0
    monkeypatch.setattr("thrifty.dashboard.board_site.READ_SECONDS", 0.0)
    first = told(site, "api/run", name="kjv")
    assert first["share"] < 1 and first["parts"].keys() == {"state"} and "figures" not in first
    last = first
    while last["share"] < 1:
        last = told(site, "api/run", name="kjv", have=last["version"])
    assert "tiles" in last["parts"] and last["figures"]


@pytest.mark.parametrize(
    "name", ["../outside", "..", ".", "/etc", "kjv/../../outside", "kjv/checkpoints", "", "kjv\0", ".hidden"]
)
@pytest.mark.parametrize("path", ["run", "api/run", "page", "folder", "result", "technique"])
def test_files_outside_listed_folders_are_not_served(site, run_folder, runs, path, name):
    folder = run_folder()
    for place in (runs.parent / "outside", runs / ".hidden", folder / "checkpoints"):
        place.mkdir()
        (place / "recipe.toml").write_text('about = "secret place"')
        (place / "report.html").write_text("secret place")
    answer = site.respond(path, {"name": name})
    assert answer.status == 404 and b"secret place" not in answer.body


def test_run_texts_are_escaped_and_secrets_redacted(site, run_folder, runs):
    secret = "hf_" + "a" * 30
    recipe = f'about = "{ATTACK} {secret}"\n[model]\npreset = "{ATTACK}"\n'.replace("\\", "")
    records = [
        {"kind": "step", "step": 1, "loss": 1.0},
        {"kind": "notice", "step": 1, "text": f"{ATTACK} {secret}"},
        {"kind": "change", "step": 1, "technique": ATTACK, "reason": secret},
    ]
    folder = run_folder(recipe=recipe, records=records, environment={"cpu": ATTACK, "command": [secret]}, summary=None)
    (runs / "sweep").mkdir()
    (runs / "sweep" / "study.json").write_text(json.dumps({"about": ATTACK + secret, "list": [{"a": ATTACK}]}))
    shown = [text(site, "run", name="kjv"), text(site, ""), text(site, "studies"), text(site, "folder", name="sweep")]
    live = told(site, "api/run", name="kjv")
    shown += live["parts"].values()
    for page in [*shown, *told(site, "api/runs")["parts"].values()]:
        assert "<script>alert" not in page and "<img" not in page and secret not in page
    assert any("[redacted]" in page for page in shown) and folder.is_dir()


def test_runs_of_a_comparison_are_listed_below_it(site, runs, run_folder, tmp_path):
    run_folder("race/adamw-0")
    variants = {"lion": {"verdict": {"verdict": "no difference"}}}
    (runs / "race" / "comparison.json").write_text(json.dumps({"about": "A race.", "outcome": {"variants": variants}}))
    assert [(entry.name, entry.kind) for entry in entries(runs)] == [("race", "comparison"), ("race/adamw-0", "run")]
    page = text(site, "studies")
    assert "A race." in page and "lion: no difference" in page and ">Page</th>" not in page, "no column is empty"
    (runs / "race" / "report.html").write_text("<p>the offline page</p>")
    assert 'href="page?name=race"' in (page := text(site, "studies")) and ">Page</th>" in page
    assert text(site, "page", name="race") == "<p>the offline page</p>"
    assert "race/adamw-0" in text(site, "") and text(site, "run", name="race/adamw-0")


def test_runs_of_a_lottery_are_folded_under_it(site, runs, run_folder):
    for name in ("text-round-0", "text-round-1-random", "text"):
        run_folder(name)
    (runs / "text-lottery").mkdir()
    (runs / "text-lottery" / "lottery.json").write_text("{}")
    groups = {entry.name: entry.group for entry in entries(runs) if entry.kind == "run"}
    assert groups == {"text": "", "text-round-0": "text-lottery", "text-round-1-random": "text-lottery"}
    page = text(site, "")
    assert 'data-fold="text-lottery"' in page and page.count('data-group="text-lottery" hidden') == 2


def test_curves_of_several_runs_share_charts(site, run_folder):
    for name in ("adamw", "lion"):
        run_folder(name)
    assert "Curves of 2 runs" in text(site, "curves", names="adamw\nlion\nabsent")
    (figure, *_) = told(site, "api/curves", names="lion\nadamw")["figures"]
    assert figure["id"] == "held_out" and set(figure["data"]["runs"]["run"]) == {"adamw", "lion"}
    assert site.respond("curves", {"names": "absent"}).status == 404


def test_an_offline_page_is_sandboxed_with_report_scripts_only(site, run_folder):
    (run_folder() / "report.html").write_text("<script>anything</script>")
    policy = site.respond("page", {"name": "kjv"}).policy
    assert policy.startswith("sandbox allow-scripts; default-src 'none'")
    (allowed,) = re.findall(r"script-src ([^;]*)", policy)
    assert all(source.startswith("'sha256-") for source in allowed.split())


def test_a_file_too_large_is_not_sent(site, run_folder, monkeypatch):
    (run_folder() / "report.html").write_text("x" * 1000)
    monkeypatch.setattr("thrifty.dashboard.board_site.LARGEST_PAGE", 999)
    assert site.respond("page", {"name": "kjv"}).status == 404


def test_a_damaged_folder_still_has_a_page(site, run_folder, monkeypatch):
    folder = run_folder(summary=None)
    (folder / "summary.json").write_text("[" * 100_000)
    (folder / "environment.json").write_text("x" * 5000)
    monkeypatch.setattr("thrifty.reporting.run_record.LARGEST", 200_000)
    damage = told(site, "api/run", name="kjv")["parts"]["damage"]
    assert "summary.json is not valid JSON" in damage and "environment.json is not valid JSON" in damage
    monkeypatch.setattr("thrifty.reporting.run_record.LARGEST", 4000)
    assert text(site, "run", name="kjv") and text(site, "")


def test_saved_results_become_tables(site, tmp_path):
    study = {
        "study": "lion_rate",
        "about": "Lion wants a lower rate.",
        "definition": {},
        "environment": {"cpu": "a processor", "cores": 2},
        "summary": {
            "lion": {"loss": {"mean": 1.7, "half_width": 0.0239, "runs": 3, "never": 0}, "steps": {"mean": None}}
        },
        "expectations": [
            {"sentence": "it does", "verdict": "holds", "held": 3, "seeds": 3},
            {"sentence": "it is faster", "verdict": "does not hold", "held": 0, "seeds": 3},
        ],
    }
    anchors = {"rates": {"memory": 0.8}, "runs": [{"run": "a", "off": -0.027}, {"run": "b", "off": 1.4e14}]}
    for name, data in (("studies/lion_rate/cpu", study), ("cluster/anchors", anchors)):
        path = tmp_path / "results" / f"{name}.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(data))
    assert "1 of 2 expectations hold" in text(site, "studies")
    page = text(site, "result", name="studies/lion_rate/cpu")
    assert "1.70 ± 0.0239" in page and "never" in page and "does not hold" in page and "a processor" in page
    assert 'href="result?name=cluster/anchors"' in text(site, "simulations")
    page = text(site, "result", name="cluster/anchors")
    assert "-0.0270" in page and "140 T" in page and "0.800" in page


def test_a_technique_has_a_card(site, run_folder):
    assert 'href="technique?name=optimizers.lion"' in text(site, "techniques")
    page = text(site, "technique", name="optimizers.lion")
    card = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page)
    assert card == [
        ("Paper", "Chen et al. 2023."),
        ("Promise", "half of AdamW&#39;s state, and no second moment."),
        ("More", "More is said in a line of its own."),
    ]
    assert "The sign of a momentum." in page and "0.0001" in page and "No such run in" in page
    explanation = {"techniques": [{"name": "optimizers.lion"}], "footprint": {}}
    run_folder("with-lion", explanation=explanation)
    assert 'href="run?name=with-lion"' in text(site, "technique", name="optimizers.lion")


def test_measured_evidence_is_on_the_card(runs, tmp_path):
    from board_examples import LION

    results = tmp_path / "results"
    (results / "studies").mkdir(parents=True)
    (results / "studies" / "rate.json").write_text('{"status": "finished"}')
    lines = [("Lion was measured", str(results / "studies" / "rate.json")), ("and again", "thrifty bench")]
    evidence = {"optimizers.lion": TechniqueEvidence({"time": "better", "measured": "here"}, lines)}
    site = BoardSite(runs, [results], lambda: [LION], lambda: evidence)
    page = text(site, "technique", name="optimizers.lion")
    assert '<a href="result?name=studies/rate">studies/rate.json</a>' in page and "Lion was measured" in page
    assert "<code>thrifty bench</code>" in page
    for shown in (page, text(site, "techniques")):
        assert '<span class="chip better">time better</span>' in shown and "measured here" in shown


def test_every_own_technique_card_has_title_and_promise():
    from thrifty import techniques
    from thrifty.dashboard.technique_cards import card_from
    from thrifty.interface.technique_profiles import profile_of

    for card in (card_from(profile_of(techniques.find(name)).as_dict()) for name in techniques.own_names()):
        assert card.title and "Promise" in card.sections, card.name


def test_an_empty_or_missing_folder_is_reported(site, runs):
    assert "No run in this folder" in text(site, "")
    runs.rmdir()
    assert "No run in this folder" in text(site, "") and "No saved results" in text(site, "studies")


def test_undecodable_names_hide_only_themselves(site, run_folder, runs):
    folder = run_folder()
    (folder / "explanation.json").write_text('{"techniques": [{"name": "\\ud800"}]}')
    odd = os.fsencode(runs) + b"/\xff"
    os.mkdir(odd)
    os.link(os.fsencode(folder / "recipe.toml"), odd + b"/recipe.toml")
    assert re.findall(r'href="run\?name=(.+?)"', text(site, "")) == ["kjv"]
    assert told(site, "api/runs")["parts"] and text(site, "run", name="kjv")


def test_a_results_table_names_its_omissions():
    rows = [{"run": str(number), "inner": {"a": 1}} for number in range(ROWS + 3)]
    (table,) = tables({"runs": rows})
    assert table.columns == ["run"] and len(table.rows) == ROWS and table.note == "Not shown: inner; 3 more rows."
    (table,) = tables({"runs": rows[:2]})
    assert table.note == "Not shown: inner."


def test_an_unreadable_study_is_reported(site, runs):
    (runs / "sweep").mkdir()
    (runs / "sweep" / "study.json").write_text("{")
    assert "This result has no tables" in text(site, "folder", name="sweep")
