"""The board in a real browser without access to other machines."""

import json
import os
import re
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from pathlib import Path

import pytest
from headless_browser import CHROMIUM, Browser
from report_folders import records

from thrifty.reporting.color_theme import DARK, LIGHT

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not on PATH (Debian: apt-get install chromium)")

TAB, ENTER = ("Tab", 9), ("Enter", 13)
SUMMARY = "document.querySelector('#figure-loss .chart').getAttribute('aria-label')"
TRAINING = """
    import json, sys, time
    from pathlib import Path
    from thrifty.training.run_folder import RunFolder

    with RunFolder(Path(sys.argv[1])).lock() as run:
        for line in sys.stdin:
            for record in json.loads(line):
                run.append(record)
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("browser") / "profile") as opened:
        yield opened


@pytest.fixture(autouse=True)
def quiet(browser):
    """Fail if a test causes a console error, or requests a resource outside the board."""
    browser.console.clear()
    browser.requests.clear()
    excused = []
    yield excused
    browser.tell("Emulation.setEmulatedMedia", features=[])
    errors = [text for text in browser.console if not any(words in text for words in excused)]
    assert not errors, errors
    outside = [
        address for address in browser.requests if not re.match(r"http://127\.0\.0\.1:\d+/|data:|about:", address)
    ]
    assert not outside, outside


def charts_are_drawn(browser, count=5):
    browser.until(f"document.querySelectorAll('.chart svg .mark-line path').length >= {count}")


def test_list_and_run_page_have_no_errors_or_outside_requests(browser, serve, run_folder):
    run_folder()
    address = serve().address
    browser.open(address)
    browser.until("document.querySelector('#rows .spark path')?.getAttribute('d').length > 50")
    browser.value("document.querySelector('#rows a').click()")
    charts_are_drawn(browser)
    assert browser.value("document.querySelector('h1').textContent") == "kjv"
    figures = browser.value("[...document.querySelectorAll('figure[id]')].map(figure => figure.id)")
    assert figures == [f"figure-{name}" for name in ("loss", "memory", "throughput", "gradient_norm", "learning_rate")]
    labels = browser.value("[...document.querySelectorAll('#figure-memory svg text')].map(text => text.textContent)")
    assert {"predicted peak 263 MB", "measured peak 276 MB"} <= {*labels}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_and_charts_follow_the_colour_scheme(browser, serve, run_folder, scheme):
    run_folder()
    browser.tell("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.open(serve().address + "run?name=kjv")
    charts_are_drawn(browser)
    colours = browser.value(
        "[getComputedStyle(document.body).backgroundColor, ...[...document.querySelectorAll("
        "'#figure-loss .mark-line path')].map(path => getComputedStyle(path).stroke)]"
    )
    palette = {"light": LIGHT, "dark": DARK}[scheme]
    wanted = [tuple(int(palette[name][i : i + 2], 16) for i in (1, 3, 5)) for name in ("ground", "faint", "train")]
    assert colours[:3] == [f"rgb{colour}" for colour in wanted]


@pytest.mark.slow
def test_the_page_follows_a_run_that_another_process_trains(browser, serve, run_folder, tmp_path):
    made = [record for record in records(120, every=10) if record["kind"] != "change"]
    folder = run_folder(records=made[:60], summary={"status": "running", "steps": 0})
    script = tmp_path / "training.py"
    script.write_text(textwrap.dedent(TRAINING))
    address = serve().address
    with subprocess.Popen([sys.executable, script, folder], stdin=subprocess.PIPE, text=True) as training:
        browser.open(address + "run?name=kjv")
        browser.until(
            "document.querySelector('#state .running') && document.querySelector('#link').textContent == 'live'"
        )
        charts_are_drawn(browser)
        steps = "[...document.querySelectorAll('.tiles div')].find(tile => tile.textContent.startsWith('Steps'))"
        before = browser.value(f"{steps}.querySelector('.value').textContent")
        browser.value("document.querySelector('#figure-loss svg').setAttribute('data-kept', 'yes')")
        training.stdin.write(json.dumps(made[60:]) + "\n")
        training.stdin.flush()
        browser.until(f"{steps}.querySelector('.value').textContent == '120'")
        assert before != "120"
        # the chart received new data without being redrawn
        browser.until("document.querySelector('#figure-loss svg').getAttribute('data-kept') == 'yes'")
        browser.until(
            "document.querySelector('#figure-loss .chart').getAttribute('aria-label').includes('at step 120')"
        )
        training.stdin.close()
    browser.until("document.querySelector('#state .killed') != null")


def test_the_list_shows_new_runs_and_keeps_the_focus(browser, serve, run_folder):
    run_folder("first", summary={"status": "running", "steps": 0})
    browser.open(serve().address + "?sort=name")
    browser.until("document.querySelectorAll('#rows tr').length == 1")
    browser.value("document.querySelector('#rows a').focus()")
    run_folder("another")
    browser.until("document.querySelectorAll('#rows tr').length == 2")
    assert browser.value("document.activeElement.getAttribute('href')") == "run?name=first"
    assert browser.value("document.querySelector('#count').textContent") == "2 runs"


def test_an_empty_list_shows_the_first_new_run(browser, serve, run_folder):
    browser.open(serve().address)
    browser.until("document.querySelector('#rows').textContent.includes('No run in this folder')")
    run_folder("first", steps=5)
    browser.until("document.querySelector('#rows a')?.textContent == 'first'")
    assert not browser.value("document.querySelector('main').textContent.includes('No run in this folder')")


@pytest.mark.slow
def test_an_open_page_requests_the_new_address_after_a_restart(browser, run_folder, runs, tmp_path, quiet):
    # browser errors when the board is gone, or has another address
    quiet += ["net::ERR_CONNECTION_REFUSED", "net::ERR_EMPTY_RESPONSE", "403 (Forbidden)"]
    folder = run_folder(summary={"status": "running", "steps": 0})
    words = [sys.executable, "-m", "thrifty", "board", "--runs", runs, "--no-open"]
    variables = os.environ | {"THRIFTY_CACHE": str(tmp_path / "cache")}

    @contextmanager
    def board(port):
        with subprocess.Popen([*words, "--port", port], stdout=subprocess.PIPE, text=True, env=variables) as process:
            try:
                yield process.stdout.readline().strip()
            finally:
                process.terminate()
                assert process.wait() == 143

    with board("0") as address:
        browser.open(address + "run?name=kjv")
        charts_are_drawn(browser)
    browser.until("document.querySelector('#link').textContent.includes('does not respond')")
    with (folder / "records.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 4321, "loss": 1.0}\n')
    port = re.search(r":(\d+)/", address).group(1)
    with board(port) as again:
        assert again != address  # each start has its own token
        browser.until("document.querySelector('#link').textContent.includes('open the address that the board printed')")
        browser.open(again + "run?name=kjv")
        charts_are_drawn(browser)
        browser.until(
            "document.querySelector('#figure-loss .chart').getAttribute('aria-label').includes('at step 4,321')"
        )
        browser.until("document.querySelector('#link').textContent == 'up to date'")  # no process trains the run


def test_all_controls_are_reachable_by_keyboard(browser, serve, run_folder):
    run_folder("kjv")
    run_folder("other")
    browser.open(serve().address + "?sort=name")
    browser.until("document.querySelectorAll('#rows tr').length == 2 && !document.querySelector('.filter').hidden")
    reached = []
    for _ in range(20):
        browser.press(*TAB)
        reached.append(browser.value("document.activeElement.getAttribute('href') || document.activeElement.id"))
        if reached[-1] == "run?name=kjv":
            break
    assert reached[0] == "#main" and "filter" in reached and "./?sort=loss" in reached and "techniques" in reached
    browser.press(*ENTER, text="\r")
    charts_are_drawn(browser)
    browser.value("document.querySelector('#figure-loss summary').focus()")
    browser.press(*ENTER, text="\r")
    rows = browser.until("document.querySelectorAll('#figure-loss details[open] tbody tr').length")
    assert rows == 24
    outline = browser.value("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"


def test_typing_filters_the_runs(browser, serve, run_folder):
    for name in ("kjv-adamw", "kjv-lion", "images"):
        run_folder(name)
    browser.open(serve().address)
    browser.until("!document.querySelector('.filter').hidden")
    browser.value("document.querySelector('#filter').focus()")
    browser.type("kjv lion")
    shown = "[...document.querySelectorAll('#rows tr:not([hidden]) a')].map(link => link.textContent).join()"
    assert (
        browser.until(shown) == "kjv-lion" and browser.value("document.querySelector('#shown').textContent") == "1 of 3"
    )


def test_runs_of_a_comparison_unfold_and_their_curves_overlay(browser, serve, run_folder, runs):
    for name in ("race/adamw-0", "race/lion-0", "kjv"):
        run_folder(name)
    (runs / "race" / "comparison.json").write_text("{}")
    browser.open(serve().address)
    shown = "[...document.querySelectorAll('#rows tr:not([hidden]) a')].map(link => link.textContent).sort().join()"
    browser.until("!!document.querySelector('.fold:not([hidden])')")
    assert browser.value(shown) == "kjv,race"
    browser.value("document.querySelector('.fold').click()")
    assert browser.value(shown) == "kjv,race,race/adamw-0,race/lion-0"
    for name in ("race/adamw-0", "race/lion-0"):
        browser.value(f"document.querySelector('[data-tick=\"{name}\"]').click()")
    browser.value("document.getElementById('curves-of').click()")
    browser.until("document.querySelectorAll('#figure-held_out .chart svg .mark-line path').length >= 2")
    assert "race/adamw-0 ends at" in browser.value(SUMMARY.replace("loss", "held_out"))


def test_hostile_text_of_a_run_runs_no_script(browser, serve, run_folder):
    attack = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    made = [
        {"kind": "step", "step": 1, "loss": 3.0},
        {"kind": "step", "step": 2, "loss": 2.0},
        {"kind": "change", "step": 1, "technique": attack, "reason": attack},
        {"kind": "notice", "step": 2, "text": attack},
    ]
    recipe = f"about = '''{attack}'''"
    run_folder(records=made, summary={"status": attack, "unit": attack, "loss_in": attack}, recipe=recipe)
    address = serve().address
    for page in ("", "run?name=kjv"):
        browser.open(address + page)
        browser.until("document.querySelector('#link').textContent")
    charts_are_drawn(browser, 1)
    assert browser.value("document.title") == "kjv – Thrifty board"
    assert browser.value("document.querySelectorAll('main img, header img').length") == 0


def test_an_offline_report_runs_its_own_scripts_only(browser, serve, run_folder, quiet):
    from thrifty.reporting.run_page import write_report

    page: Path = write_report(run_folder())
    address = serve().address + "page?name=kjv"
    browser.open(address)
    browser.until("document.querySelectorAll('figure svg').length == 5")
    page.write_text("<title>plain</title><script>document.title = 'owned'</script><p>shown</p>")
    browser.open(address + "&again=1")
    browser.until("document.querySelector('p')?.textContent == 'shown'")
    assert browser.value("document.title") == "plain"
    assert len(browser.console) == 1 and "Content Security Policy" in browser.console[0]
    quiet.append("Content Security Policy")


LISTS_FIT = (
    "[...document.querySelectorAll('.listed')].every(list => list.scrollWidth <= list.closest('.scroll').clientWidth)"
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("page", ["", "run?name=a-run", "studies", "techniques", "technique?name=optimizers.lion"])
def test_a_phone_needs_no_sideways_scrolling(browser, serve, run_folder, page):
    run_folder("a-run")
    run_folder("a-run-with-a-rather-long-name" * 3)
    browser.tell("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=1, mobile=True)
    try:
        browser.open(serve().address + page)
        browser.until("document.readyState == 'complete' && document.querySelector('main').textContent.length > 50")
        wide = browser.value("[document.documentElement.scrollWidth, innerWidth]")
        assert wide[0] <= wide[1]
        assert browser.value(LISTS_FIT), "lists of results have no hidden columns"
    finally:
        browser.tell("Emulation.clearDeviceMetricsOverride")
