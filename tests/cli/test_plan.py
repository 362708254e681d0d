"""`thrifty plan size` prints what each published law recommends, `thrifty plan fit` what one's own runs say."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from thrifty.cli.plan.plan_verb import command
from thrifty.core.errors import UsageError
from thrifty.planning.scaling_law import ScalingLaw
from thrifty.planning.scaling_law_fit import TrainedRun, synthetic_runs
from thrifty.planning.scaling_runs import runs_from_folders, runs_from_table
from thrifty.training.run_folder import RunFolder

LAW = ScalingLaw(E=1.5, A=60.0, B=200.0, alpha=0.3, beta=0.35)


def shown(*words: object) -> str:
    result = CliRunner().invoke(command, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def told(*words: object) -> dict[str, Any]:
    return json.loads(shown(*words, "--json"))


def refused(*words: object) -> UsageError:
    with pytest.raises(UsageError) as error:
        shown(*words)
    assert error.value.fix
    return error.value


@pytest.fixture
def runs() -> Sequence[TrainedRun]:
    return synthetic_runs(LAW, np.geomspace(3e5, 3e7, 5), np.geomspace(1e13, 1e16, 4), noise=0.002)


def write_table(path: Path, runs: Sequence[TrainedRun], header: str = "parameters,tokens,loss") -> Path:
    path.write_text("\n".join([header, *(f"{run.parameters!r},{run.tokens!r},{run.loss!r}" for run in runs)]) + "\n")
    return path


def write_run(folder: Path, run: TrainedRun, status: str = "finished") -> Path:
    with RunFolder.create(folder) as made:
        made.write_text("recipe.toml", 'name = "run"\n')
        made.write_json("summary", {"status": status, "tokens": run.tokens, "held_out_loss": run.loss})
        made.write_json("explanation", {"parameters": run.parameters})
    return folder


def test_the_table_has_published_ratios_with_intervals() -> None:
    page = shown("size", "--flops", "5.76e23")
    rows = {line.split("  ")[0]: line for line in page.splitlines()[1:5]}
    assert "32.2 G" in rows["Hoffmann, as printed"] and "92.6" in rows["Hoffmann, as printed"]
    assert "40.4 G" in rows["Hoffmann, unrounded"] and "58.9" in rows["Hoffmann, unrounded"]
    assert "unknown" in rows["Hoffmann, unrounded"]
    assert "18.4" in rows["Epoch AI, published"] and " to " in rows["Epoch AI, published"]
    assert "17.9" in rows["re-fit"] and "1.31 T" in rows["re-fit"]
    assert "extrapolated" in page and "nearest preset: llama-8b" in page and "read second-hand" in page
    assert "extrapolated" not in shown("size", "--flops", "1e20")


def test_json_is_one_document_with_the_same_facts() -> None:
    found = told("size", "--flops", "5.76e23")
    ratios = {row["name"]: row["tokens_per_parameter"] for row in found["rows"]}
    assert [round(ratio) for ratio in ratios.values()] == [93, 59, 18, 18]
    for row in found["rows"]:
        assert 6 * row["parameters"] * row["tokens"] == pytest.approx(5.76e23)
        assert row["source"] and row["evidence"] and row["law"]["E"] > 1
    assert found["given"] == {"flops": 5.76e23} and found["machine"] is None
    low, high = found["rows"][-1]["intervals"]["tokens_per_parameter"]
    assert low < ratios["re-fit"] < high


@pytest.mark.slow
def test_hours_become_flops_by_measured_rate_and_utilisation() -> None:
    found = told("size", "--hours", "2", "--utilisation", "0.3")
    machine = found["machine"]
    assert machine["utilisation"] == 0.3 and machine["sustained"] == pytest.approx(0.3 * machine["peak"])
    assert found["flops"] == pytest.approx(7200 * machine["sustained"])
    assert 1e9 < machine["peak"] < 1e16
    assert "0.4 of it assumed for training" in shown("size", "--hours", "1")


@pytest.mark.slow
def test_tokens_ask_for_the_model_that_suits_them() -> None:
    found = told("size", "--tokens", "3e9")
    row = found["rows"][-1]
    back = told("size", "--flops", row["flops"])["rows"][-1]
    assert row["tokens"] == 3e9 and back["parameters"] == pytest.approx(row["parameters"])
    assert set(row["intervals"]) == {"parameters", "flops", "tokens_per_parameter", "loss"}
    assert "FLOP" in shown("size", "--tokens", "3e9").splitlines()[0]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("size",), "there is no compute budget"),
        (("size", "--flops", "1e18", "--hours", "2"), "--flops and --hours exclude each other"),
        (("size", "--flops", "-1e18"), "--flops is -1e+18"),
        (("size", "--flops", "nan"), "--flops is nan"),
        (("size", "--flops", "1"), "the optimal sizes would be"),
        (("size", "--tokens", "1e-9"), "the optimal sizes would be"),
        (("size", "--hours", "0"), "--hours is 0"),
        (("size", "--hours", "1", "--utilisation", "1.5"), "utilisation is 1.5"),
        (("fit",), "there are no runs to fit"),
        (("fit", "--csv", "absent.csv"), "absent.csv' cannot be read"),
        (("fit", "--csv", "/dev/zero"), "/dev/zero"),
        (("fit", "--csv", "absent.csv", "--flops", "-2"), "--flops is -2"),
        (("fit", "no-such-run"), "there is no run 'no-such-run'"),
    ],
    ids=" ".join,
)
def test_incomplete_size_requests_are_refused_with_the_fix(words: tuple[str, ...], says: str) -> None:
    assert says in refused(*words).what


@pytest.mark.slow
def test_a_table_of_runs_yields_law_and_sizes(tmp_path: Path, runs: Sequence[TrainedRun]) -> None:
    table = write_table(tmp_path / "runs.csv", runs)
    found = told("fit", "--csv", table, "--flops", "1e16", "--resamples", "40")
    assert found["runs"] == 20 and found["starts"] == 243 and found["without_optimum"] == 0
    for name in ("E", "alpha", "beta", "size_exponent"):
        low, high = found["intervals"][name]
        assert low < found["constants"][name] < high
        assert found["constants"][name] == pytest.approx(getattr(LAW, name), rel=0.1)
    assert found["sizing"]["parameters"] == pytest.approx(LAW.optimal(1e16).parameters, rel=0.2)
    page = shown("fit", "--csv", table, "--flops", "1e17", "--resamples", "40")
    assert "20 runs of 300 k to 30.0 M parameters" in page and "exponent of N" in page and "extrapolated" in page


@pytest.mark.slow
def test_run_folders_say_the_same_as_a_table_of_them(
    tmp_path: Path, runs: Sequence[TrainedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, run in enumerate(runs):
        write_run(tmp_path / "runs" / f"run-{number}", run)
    table = write_table(tmp_path / "runs.csv", runs)
    monkeypatch.chdir(tmp_path)
    names = [f"run-{number}" for number in range(len(runs))]
    assert told("fit", *names, "--resamples", "5") == told("fit", "--csv", table, "--resamples", "5")
    assert "pass runs or a table, not both" in refused("fit", *names, "--csv", table).what


def test_a_run_that_has_not_finished_is_refused(tmp_path: Path, runs: Sequence[TrainedRun]) -> None:
    folder = write_run(tmp_path / "run", runs[0], status="interrupted")
    error = refused("fit", folder)
    assert "is interrupted" in error.what and "thrifty resume" in error.fix


@pytest.mark.slow
def test_the_columns_of_the_digitised_runs_are_understood(tmp_path: Path, runs: Sequence[TrainedRun]) -> None:
    epoch = ["x,Model Size,Training FLOP,loss", *(f"0,{run.parameters},{run.flops},{run.loss}" for run in runs)]
    (tmp_path / "epoch.csv").write_text("\n".join(epoch))
    plain = told("fit", "--csv", write_table(tmp_path / "runs.csv", runs), "--resamples", "2")
    found = told("fit", "--csv", tmp_path / "epoch.csv", "--resamples", "2")
    assert found["constants"] == pytest.approx(plain["constants"], rel=1e-4)


@pytest.mark.slow
def test_runs_of_highest_loss_can_be_left_out(tmp_path: Path, runs: Sequence[TrainedRun]) -> None:
    worst = TrainedRun(1e6, 1e8, 50.0)
    table = write_table(tmp_path / "runs.csv", [worst, *runs])
    assert told("fit", "--csv", table, "--drop-worst", "1", "--resamples", "2")["runs"] == 20
    assert "cannot determine" in refused("fit", "--csv", table, "--drop-worst", "17").what


@pytest.mark.parametrize(
    ("header", "row", "what", "fix"),
    [
        ("parameters,token,loss", "1,2,3", "no column 'tokens'", "did you mean 'token'"),
        ("a,b,c", "1,2,3", "no column 'parameters'", "parameters,tokens,loss"),
        ("parameters,tokens,loss", "1e6,many,3", "line 2", "positive numbers"),
        ("parameters,tokens,loss", "1e6,1e8", "line 2 of", "positive numbers"),
        ("parameters,tokens,loss", "1e6,1e8", "loss is missing", "remove the line"),
        ("parameters,tokens,loss,loss", "1e6,1e8,3,4", "has 2 columns 'loss'", "keep one"),
        ("parameters;tokens;loss", "1e6;1e8;3,5", "'3,5'", "positive numbers"),
        ("parameters,tokens,loss", "1e6,1e8,-3", "loss of a run is -3", "positive numbers"),
        ("parameters,flops,loss", "0,1e8,3", "line 2", "positive numbers"),
        ("parameters,tokens,loss", "1e6,1e8,3", "1 runs cannot determine", "at least 6"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused(tmp_path: Path, header: str, row: str, what: str, fix: str) -> None:
    table = tmp_path / "runs.csv"
    table.write_text(f"{header}\n{row}\n")
    error = refused("fit", "--csv", table)
    assert what in error.what and fix in error.fix


@pytest.mark.parametrize("separator", [";", "\t", " , ", ","])
@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
def test_tables_may_use_other_separators_and_line_ends(
    tmp_path: Path, runs: Sequence[TrainedRun], separator: str, ending: str
) -> None:
    lines = [("name", "loss", "parameters", "tokens"), *(("a, b", r.loss, r.parameters, r.tokens) for r in runs), ()]
    text = ending.join(separator.join(f'"{x}"' if x == "a, b" else str(x) for x in line) for line in lines)
    (tmp_path / "runs.csv").write_bytes(text.encode())
    found = runs_from_table(tmp_path / "runs.csv")
    assert found == [TrainedRun(float(r.parameters), float(r.tokens), float(r.loss)) for r in runs]
    (tmp_path / "runs.csv").write_bytes(text.encode() + f"x{separator}{separator}1{separator}2".encode())
    with pytest.raises(UsageError, match=f"line {len(runs) + 2} of .*: loss is missing"):
        runs_from_table(tmp_path / "runs.csv")


@pytest.mark.slow
def test_the_nearest_preset_is_a_language_model() -> None:
    for flops in ("1e12", "7e14", "2e17", "1e19"):
        assert told("size", "--flops", flops)["nearest_preset"]["name"].startswith(("gpt", "llama", "smollm"))


def test_runs_of_different_tokenizers_are_refused(tmp_path: Path, runs: Sequence[TrainedRun]) -> None:
    folders = [write_run(tmp_path / f"run-{number}", run) for number, run in enumerate(runs)]
    for folder in folders:
        (folder / "tokenizer.json").write_text("{}")
    assert len(runs_from_folders(folders)) == len(runs)
    (folders[3] / "tokenizer.json").write_text('{"other": 1}')
    assert "have different tokenizers" in refused("fit", *folders).what


@pytest.mark.parametrize("damaged", ['{"status": "finished"}', "[]", '"finished"'])
@pytest.mark.parametrize("file", ["summary", "explanation"])
def test_a_run_folder_that_says_something_else_is_refused(
    tmp_path: Path, runs: Sequence[TrainedRun], damaged: str, file: str
) -> None:
    folder = write_run(tmp_path / "run", runs[0])
    (folder / f"{file}.json").write_text(damaged)
    assert "is damaged" in refused("fit", folder).what


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_bytes(bytes(range(128, 256)))
    assert "cannot be read" in refused("fit", "--csv", tmp_path / "runs.csv").what
    (tmp_path / "empty.csv").touch()
    assert "no column" in refused("fit", "--csv", tmp_path / "empty.csv").what
