import json

from click.testing import CliRunner

from thrifty.cli.report import command
from thrifty.core.errors import UsageError


def test_json_is_one_document_with_the_key_numbers(write_run, tmp_path, monkeypatch):
    write_run("bible", steps=60)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(command, ["bible", "--json"])
    assert result.exit_code == 0
    output = json.loads(result.stdout)
    assert output["run"] == "bible" and output["status"] == "finished" and output["steps"] == 60
    assert output["report"].endswith("runs/bible/report.html") and len(output["plots"]) == 5
    assert (tmp_path / "runs" / "bible" / "report.html").is_file()


def test_without_json_the_verdict_and_the_path_are_printed(write_run):
    folder = write_run(steps=60)
    lines = CliRunner().invoke(command, [str(folder)]).stdout.splitlines()
    assert lines[0].startswith("kjv: The held-out loss is") and lines[1] == str(folder / "report.html")


def test_a_folder_of_something_else_is_a_usage_error(tmp_path):
    result = CliRunner().invoke(command, [str(tmp_path)])
    assert isinstance(result.exception, UsageError) and result.exception.exit_code == 2
