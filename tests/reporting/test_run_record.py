import json
from pathlib import Path

import pytest

from thrifty.core.errors import UsageError
from thrifty.reporting.run_record import find_run, read_run


def append(folder: Path, text: str) -> None:
    with (folder / "records.jsonl").open("a") as file:
        file.write(text)


def test_the_last_record_of_a_step_counts(write_run):
    folder = write_run(steps=20)
    append(folder, json.dumps({"kind": "step", "step": 20, "loss": 1.25}) + "\n")
    record = read_run(folder)
    assert [step["step"] for step in record.steps] == list(range(1, 21))
    assert record.steps[-1]["loss"] == 1.25


def test_an_incomplete_last_line_is_skipped_silently(write_run):
    folder = write_run(steps=20)
    append(folder, '{"kind": "step", "step": 21, "lo')
    record = read_run(folder)
    assert record.last_step == 20
    assert record.damage == ()


def test_a_damaged_line_in_the_middle_is_reported(write_run):
    folder = write_run(steps=20)
    lines = (folder / "records.jsonl").read_text().splitlines()
    lines[4] = lines[4][:30]
    lines[6] = '["not", "a", "record"]'
    (folder / "records.jsonl").write_text("\n".join(lines) + "\n")
    (sentence,) = read_run(folder).damage
    assert "2 unreadable lines" in sentence and "the first is line 5" in sentence


def test_several_notices_of_one_step_are_all_kept(write_run):
    notices = [{"kind": "notice", "step": 1, "text": text} for text in ("first", "second", "first")]
    assert sorted(event["text"] for event in read_run(write_run(records=notices)).events) == ["first", "second"]


@pytest.mark.parametrize("name", ["origins", "environment", "explanation", "summary"])
def test_an_unreadable_file_is_named_and_the_rest_is_read(write_run, name):
    folder = write_run(steps=20)
    (folder / f"{name}.json").write_text('{"half": ')
    record = read_run(folder)
    assert getattr(record, name) == {}
    assert [sentence for sentence in record.damage if name in sentence]
    assert len(record.steps) == 20


def test_another_folder_is_refused(tmp_path):
    with pytest.raises(UsageError, match="is not a run folder"):
        read_run(tmp_path)


def test_a_run_is_found_by_path_or_name_with_suggestions(write_run, tmp_path, monkeypatch):
    folder = write_run("bible", steps=5)
    monkeypatch.chdir(tmp_path)
    assert find_run("bible").resolve() == find_run(str(folder)).resolve() == folder
    with pytest.raises(UsageError, match="did you mean 'bible'"):
        find_run("bibel")
