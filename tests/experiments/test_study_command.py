"""`thrifty study NAME` on the command line."""

import json
from pathlib import Path

import pytest
from command_line import CommandLine

SMALL = ("--seeds", "3", "--jobs", "1", "--set", "examples=60", "--set", "features=4")


@pytest.fixture
def thrifty(tmp_path: Path) -> CommandLine:
    return CommandLine(tmp_path)


@pytest.mark.slow
def test_a_study_is_measured_saved_and_compared(thrifty: CommandLine) -> None:
    kept = thrifty.folder / "results" / "depth_preconditioner" / "cpu.json"
    done = thrifty("study", "depth_preconditioner", *SMALL, "--save-result", kept)
    assert "| p 4, depth 1 " in done.stdout
    assert "l4: two factors require less than 0.7 of the steps of one" in done.stdout
    assert "[18/18]" in done.stderr
    facts = json.loads(kept.read_text())["environment"]
    assert {"cpu", "torch", "python", "command"} <= facts.keys()

    changed = json.loads(kept.read_text())
    changed["summary"]["p 2, depth 3"]["steps"]["mean"] *= 50
    wrong = thrifty.folder / "wrong.json"
    wrong.write_text(json.dumps(changed))
    again = ("study", "depth_preconditioner", *SMALL, "--name", "again")
    off = thrifty(*again, "--baseline-result", wrong, exit_code=1).stderr
    assert "off: p 2, depth 3: steps is" in off
    assert "15 of 16 values agree" in off
    # finished by now, so it is only compared
    assert "16 of 16 values agree" in thrifty(*again, "--baseline-result", kept).stderr
    assert "exists already" in thrifty(*again, "--save-result", kept, exit_code=2).stderr


@pytest.mark.slow
def test_a_finished_study_is_refused(thrifty: CommandLine) -> None:
    found = thrifty.json("study", "depth_preconditioner", *SMALL, "--cases", "p 2")
    assert {cell["case"] for cell in found["cells"]} == {"p 2, depth 1", "p 2, depth 2", "p 2, depth 3"}
    assert "finished" in thrifty("study", "depth_preconditioner", *SMALL, "--cases", "p 2", exit_code=2).stderr


@pytest.mark.slow
def test_some_cases_are_compared_with_a_saved_result(thrifty: CommandLine) -> None:
    kept = thrifty.folder / "kept.json"
    thrifty("study", "depth_preconditioner", *SMALL, "--save-result", kept)
    part = ("study", "depth_preconditioner", *SMALL, "--cases", "p 2", "--name", "part", "--baseline-result", kept)
    assert "[9/9]" in (measured := thrifty(*part).stderr)
    compared = thrifty(*part).stderr
    assert "[1/" not in compared and compared.splitlines()[-1] == measured.splitlines()[-1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("depth_preconditioner", "--data", "my.txt"), "No such option '--data'"),
        (("depth_preconditioner", "--with", "compile"), "No such option '--with'"),
        (("depth_preconditioner", "--set", "width=3"), "no setting 'width'"),
        (("depth_preconditioner", "--baseline-result", "no.json"), "there is no result 'no.json'"),
        (("depth_preconditioner", "--save-result", "here"), "not a .json file"),
        (("depth_preconditioner", "--save-result", "k.json", "--cases", "p 2"), "--save-result requires a whole study"),
        (("depth_precondition",), "did you mean 'depth_preconditioner'"),
    ],
)
def test_invalid_options_are_refused_at_once(thrifty: CommandLine, words: tuple[str, ...], said: str) -> None:
    assert said in thrifty("study", *words, exit_code=2).stderr
    assert not (thrifty.folder / "runs").exists()


def test_train_refers_to_the_study_command(thrifty: CommandLine) -> None:
    assert "thrifty study depth_preconditioner" in thrifty("train", "depth_preconditioner", exit_code=2).stderr
    assert "No such option '--seeds'" in thrifty("train", "text", "--seeds", "3", exit_code=2).stderr


def test_studies_are_listed_with_their_duration(thrifty: CommandLine) -> None:
    rows = {row["name"]: row["about"] for row in thrifty.json("list", "studies")}
    assert "About 0.5 min." in rows["depth_preconditioner"]
