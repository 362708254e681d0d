"""`thrifty train STUDY` as people type it."""

import json
from pathlib import Path

import pytest
from command_line import CommandLine

SMALL = ("--seeds", "3", "--jobs", "1", "--set", "examples=60", "--set", "features=4")


@pytest.fixture
def thrifty(tmp_path: Path) -> CommandLine:
    return CommandLine(tmp_path)


def test_a_study_is_measured_kept_compared_and_caught_when_it_differs(thrifty: CommandLine) -> None:
    kept = thrifty.folder / "results" / "depth_preconditioner" / "cpu.json"
    done = thrifty("train", "depth_preconditioner", *SMALL, "--keep", kept)
    assert "| p 4, depth 1 " in done.stdout
    assert "l4: two factors need less than 0.7 of one's steps" in done.stdout
    assert "[18/18]" in done.stderr
    facts = json.loads(kept.read_text())["environment"]
    assert {"cpu", "torch", "python", "command"} <= facts.keys()

    changed = json.loads(kept.read_text())
    changed["summary"]["p 2, depth 3"]["steps"]["mean"] *= 50
    wrong = thrifty.folder / "wrong.json"
    wrong.write_text(json.dumps(changed))
    again = ("train", "depth_preconditioner", *SMALL, "--name", "again")
    off = thrifty(*again, "--against", wrong, exit_code=1).stderr
    assert "off: p 2, depth 3: steps is" in off
    assert "15 of 16 numbers agree" in off
    # finished by now, and compared as it stands
    assert "16 of 16 numbers agree" in thrifty(*again, "--against", kept).stderr
    assert "exists already" in thrifty(*again, "--keep", kept, exit_code=2).stderr

    part = ("train", "depth_preconditioner", *SMALL, "--only", "p 2", "--name", "part", "--against", kept)
    assert "[9/9]" in (measured := thrifty(*part).stderr)
    compared = thrifty(*part).stderr
    assert "[1/" not in compared and compared.splitlines()[-1] == measured.splitlines()[-1]


def test_a_finished_study_is_refused_and_its_json_is_one_document(thrifty: CommandLine) -> None:
    found = thrifty.json("train", "depth_preconditioner", *SMALL, "--only", "p 2")
    assert {cell["case"] for cell in found["cells"]} == {"p 2, depth 1", "p 2, depth 2", "p 2, depth 3"}
    assert "finished" in thrifty("train", "depth_preconditioner", *SMALL, "--only", "p 2", exit_code=2).stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("depth_preconditioner", "--data", "my.txt"), "is a study, which has no --data"),
        (("depth_preconditioner", "--with", "compile"), "is a study, which has no --with"),
        (("depth_preconditioner", "--set", "width=3"), "no setting 'width'"),
        (("depth_preconditioner", "--against", "no.json"), "there is no result no.json"),
        (("depth_preconditioner", "--keep", "here"), "not a .json file"),
        (("depth_preconditioner", "--keep", "k.json", "--only", "p 2"), "--keep keeps a whole study"),
        (("text", "--seeds", "3"), "text is a recipe, which has no --seeds"),
        (("text", "--against", "no.json"), "text is a recipe, which has no --against"),
        (("depth_precondition",), "did you mean 'depth_preconditioner'"),
    ],
)
def test_options_that_mean_nothing_are_refused_at_once(thrifty: CommandLine, words: tuple[str, ...], said: str) -> None:
    assert said in thrifty("train", *words, exit_code=2).stderr
    assert not (thrifty.folder / "runs").exists()


def test_studies_are_listed_with_what_they_take(thrifty: CommandLine) -> None:
    rows = {row["name"]: row["about"] for row in thrifty.json("list", "studies")}
    assert "About 0.5 min." in rows["depth_preconditioner"]
