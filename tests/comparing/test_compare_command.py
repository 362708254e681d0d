"""`thrifty compare`: options, output and saved results, and `thrifty show` afterwards."""

import json
import os
import re
from pathlib import Path
from statistics import mean, stdev

import pytest
from click.testing import CliRunner, Result
from simulated_runs import Simulated

from thrifty.cli.main import thrifty
from thrifty.cli.show import command as show
from thrifty.core.errors import UsageError
from thrifty.experiments.evidence import evidence_by_technique
from thrifty.experiments.past_results import past_comparisons
from thrifty.reporting.comparison_charts import charts
from thrifty.reporting.comparison_page import cautions, render
from thrifty.reporting.comparison_tables import tables

SWAP = ("--variant", "lion: --without optimizers.adamw --with optimizers.lion:lr=2e-4")


@pytest.fixture(autouse=True)
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Simulated:
    """A worker that simulates all runs."""
    monkeypatch.chdir(tmp_path)
    effect = Simulated(effect=lambda recipe: 0.2 * any(one.name == "optimizers.lion" for one in recipe.techniques))
    monkeypatch.setattr("thrifty.comparing.comparison_workers.Worker", lambda launcher, threads: effect)
    return effect


def typed(*words: str) -> Result:
    return CliRunner().invoke(thrifty, ["compare", "vit-digits", *words], catch_exceptions=False)


def test_unnamed_variants_are_named_by_their_changes() -> None:
    texts = ["--without optimizers.adamw --with optimizers.lion:lr=2e-4", "--set data.batch=16"]
    result = typed("--variant", texts[0], "--variant", texts[1], "--seeds", "8", "--budget", "40steps", "--json")
    assert result.exit_code == 0
    results = json.loads(result.stdout)
    assert [*results["definition"]["variants"]][1:] == texts
    assert results["folder"] == "runs/vit-digits-comparison"


def test_help_options() -> None:
    for words in (["compare", "-h"], ["compare", "--help"]):
        assert "Compare variants with the baseline RECIPE" in CliRunner().invoke(thrifty, words).stdout


def test_output_has_verdict_budgets_and_trials() -> None:
    result = typed(*SWAP, "--seeds", "8", "--budget", "40steps")
    for words in ("equal seconds in training steps, 8 paired seeds", "each at the best of 3 learning rates",
                  "lion: worse: held-out loss higher by", "FLOPs per step", "time to the baseline's loss",
                  "Learning rates tried", "runs/vit-digits-comparison/report.html"):  # fmt: skip
        assert words in result.stdout, words
    assert "[24/24]" in result.stderr


def test_too_few_seeds_have_no_verdict() -> None:
    assert "undecided: 3 pairs cannot pass a test at 3.0 %; it requires 7 pairs" in typed(*SWAP, "--seeds", "3").stdout


def test_interrupted_comparison_prints_how_to_resume(worker: Simulated) -> None:
    worker.stops_at = "baseline-seed-0"
    result = typed(*SWAP, "--seeds", "1", "--rate-trials", "1")
    assert result.exit_code == 143 and "resumes it" in result.stdout
    assert typed(*SWAP, "--seeds", "1", "--rate-trials", "1").exit_code == 0


def test_saved_result_is_never_overwritten_and_has_no_path() -> None:
    words = (*SWAP, "--seeds", "7", "--rate-trials", "1", "--save-result", "results/comparisons/lion/cpu.json")
    typed(*words)
    saved = json.loads(Path("results/comparisons/lion/cpu.json").read_text())
    assert saved["schema"] == "thrifty.comparison/1" and "folder" not in saved
    with pytest.raises(UsageError, match="exists already"):
        typed(*words)


def test_evidence_names_technique_role_and_scale() -> None:
    typed(
        *SWAP,
        "--variant",
        "--without schedules.cosine --with schedules.linear --set data.batch=32",
        "--seeds",
        "8",
        "--rate-trials",
        "1",
        "--name",
        "race",
    )
    results = {(one.technique, one.role): one for one in past_comparisons(Path("runs"))}
    assert results.keys() == {
        ("optimizers.adamw", "removed"), ("optimizers.lion", "added"),
        ("schedules.cosine", "removed"), ("schedules.linear", "added"),
    }  # fmt: skip
    lion = results["optimizers.lion", "added"]
    assert (lion.verdict, lion.others, lion.alone, lion.pairs) == ("worse", ("optimizers.adamw",), False, 8)
    assert lion.relative == pytest.approx(0.2, abs=0.05)
    assert (lion.device, lion.parameters, lion.steps, lion.equal) == ("cpu", 1000, 600, "time")
    assert lion.file == Path("runs/race/comparison.json")
    assert past_comparisons(Path("runs")) == [one for one in past_comparisons() if one.file == lion.file]
    assert past_comparisons(Path("absent")) == []


def test_evidence_skips_unfinished_and_damaged_comparisons(worker: Simulated) -> None:
    worker.stops_at = "baseline-seed-0"
    typed(*SWAP, "--seeds", "1", "--rate-trials", "1", "--name", "cut")
    damaged = ("[1, 2", "[]", '{"schema": "thrifty.comparison/1", "status": "finished", "runs": [{}]}')
    for number, content in enumerate(damaged):
        Path(f"runs/other-{number}").mkdir()
        Path(f"runs/other-{number}/comparison.json").write_text(content)
    assert past_comparisons(Path("runs")) == []


def test_show_prints_measured_evidence() -> None:
    assert "not measured yet" in CliRunner().invoke(show, ["losses.z_loss"]).stdout
    typed(*SWAP, "--seeds", "8", "--rate-trials", "1", "--name", "race")
    printed = CliRunner().invoke(show, ["optimizers.lion"]).stdout
    (line,) = re.findall(r"added in place of optimizers\.adamw.*runs/race.*", printed)
    assert "equal time: worse: held-out loss higher" in line and "runs/race/comparison.json" in line
    document = json.loads(CliRunner().invoke(show, ["optimizers.lion", "--json"]).stdout)
    files = {one["file"]: one["verdict"] for one in document["evidence"]["comparisons"]}
    assert files["runs/race/comparison.json"] == "worse" and document["evidence"]["studies"]


def test_show_finds_saved_results_of_studies() -> None:
    evidence = evidence_by_technique([Path(__file__).parents[2] / "results"])
    (study,) = evidence["optimizers.lion"].studies
    assert study.study == "lion_rate" and 0 <= study.held <= study.expected > 0
    assert evidence["growth.compound"].findings and not evidence["growth.compound"].studies


def test_page_names_the_device_of_the_runs(tmp_path: Path) -> None:
    typed(*SWAP, "--seeds", "1", "--rate-trials", "1", "--name", "race")
    data = json.loads((tmp_path / "runs" / "race" / "comparison.json").read_text())
    for entry in data["runs"]:
        entry["device"] = "cuda:0"
    assert "<td>cuda:0</td>" in render(data)


def test_page_has_setup_rates_and_seeds(tmp_path: Path) -> None:
    typed(*SWAP, "--seeds", "1", "--rate-trials", "3", "--name", "race")
    data = json.loads((tmp_path / "runs" / "race" / "comparison.json").read_text())
    shown = {title: (head, rows) for title, _, head, rows in tables(data)}
    setup = [tuple(row) for row in shown["Setup"][1]]
    assert ("baseline", "data = digits") in setup and ("lion", "without optimizers.adamw") in setup
    assert ("lion", "optimizers.lion.lr = 0.0002") in setup
    head, rows = shown["All runs"]
    rates = {row[0]: (row[head.index("seed")], row[head.index("learning rate")]) for row in rows}
    assert rates["variant-1-trial-0"] == ("", "0.0001") and rates["variant-1-trial-2"] == ("", "0.0004")
    assert rates["variant-1-seed-0"] == ("0", f"{data['rates']['lion']['lr']:.3g}")


def test_page_has_losses_by_seed_with_means_and_deviations(tmp_path: Path) -> None:
    typed(*SWAP, "--seeds", "4", "--rate-trials", "1", "--name", "race")
    data = json.loads((tmp_path / "runs" / "race" / "comparison.json").read_text())
    head, rows = next((head, rows) for title, _, head, rows in tables(data) if title == "Held-out loss by seed")
    assert head == ["seed", "baseline", "lion", "lion - baseline"]
    losses = {
        (entry["variant"], str(entry["seed"])): entry["held_out_loss"] for entry in data["runs"] if "seed" in entry
    }
    assert [row[0] for row in rows] == ["0", "1", "2", "3", "mean", "standard deviation"]
    gaps = [losses["lion", seed] - losses["baseline", seed] for seed in "0123"]
    assert [float(row[3]) for row in rows] == pytest.approx([*gaps, mean(gaps), stdev(gaps)], rel=1e-3)
    data["runs"] = [entry for entry in data["runs"] if (entry["variant"], entry.get("seed")) != ("lion", 2)]
    assert [row[0] for row in next(rows for title, _, _, rows in tables(data) if "by seed" in title)][:3] == [
        "0",
        "1",
        "3",
    ]


@pytest.mark.parametrize(
    ("relative", "effect", "headline"),
    [
        (0.004, 0.01, "lion is worse than the baseline, by less than 1.0 %"),
        (0.04, 0.01, "lion is worse than the baseline<"),
    ],
)
def test_headline_of_a_small_difference_says_so(tmp_path: Path, relative: float, effect: float, headline: str) -> None:
    typed(*SWAP, "--seeds", "8", "--rate-trials", "1", "--budget", "40steps", "--name", "race")
    data = json.loads((tmp_path / "runs" / "race" / "comparison.json").read_text())
    data["definition"]["protocol"]["effect"] = effect
    data["outcome"]["variants"]["lion"]["verdict"] |= {"verdict": "worse", "relative": relative}
    assert headline in render(data)


def test_untuned_rates_and_unlearned_models_are_said(tmp_path: Path) -> None:
    typed(*SWAP, "--seeds", "1", "--rate-trials", "1", "--name", "race")
    data = json.loads((tmp_path / "runs" / "race" / "comparison.json").read_text())
    assert any("not tuned" in caution for caution in cautions(data))
    for entropy, is_said in ((0.5, True), (9.0, False)):
        for fact in ("unigram_entropy", "label_entropy"):
            for entry in data["runs"]:
                entry["judged_on"] = {fact: entropy}
            assert any("frequencies alone" in caution for caution in cautions(data)) == is_said


@pytest.mark.parametrize("equal", ["time", "steps", "tokens", "flops"])
def test_curves_are_over_the_equal_budget(tmp_path: Path, equal: str) -> None:
    typed(*SWAP, "--seeds", "1", "--rate-trials", "1", "--name", "race")
    data = json.loads((tmp_path / "runs" / "race" / "comparison.json").read_text())
    data["definition"]["protocol"]["equal"] = equal
    ((_, _, chart),) = [each for each in charts(data) if each[0].startswith("Held-out")]
    last = {point["variant"]: point["used"] for point in chart.to_dict()["data"]["values"]}
    run = next(entry for entry in data["runs"] if entry["run"] == "baseline-seed-0")
    expected = {"time": run["curve"][-1][1]}.get(equal, run.get(equal))
    assert last["baseline"] == pytest.approx(expected)


def test_page_begins_with_verdict_and_chart(tmp_path: Path) -> None:
    typed(*SWAP, "--seeds", "8", "--rate-trials", "1", "--budget", "40steps", "--name", "race")
    page = (tmp_path / "runs" / "race" / "report.html").read_text()
    headline, curves, differences, tables = (
        page.index(words)
        for words in ("lion is worse than the baseline", ">Held-out loss over time<", ">Differences<", ">Details<")
    )
    assert headline < curves < differences < tables
    assert page.index("<table") > tables and "<details><summary>All runs" in page
    assert ">error</th>" not in page, "columns without values are omitted"


def test_page_has_no_script_and_no_external_links(tmp_path: Path) -> None:
    typed(
        "--variant",
        "<script>alert(1)</script>: --set data.batch=32",
        "--seeds",
        "7",
        "--rate-trials",
        "1",
        "--name",
        "race",
    )
    page = (tmp_path / "runs" / "race" / "report.html").read_text()
    assert "<script" not in page and not re.findall(r"""(?:src|href)=["'](?!#)""", page)
    assert "default-src 'none'" in page
    assert page.count("<svg") == 4 and "&lt;script&gt;alert(1)" in page
    assert os.listdir("runs/race").count("report.html") == 1
