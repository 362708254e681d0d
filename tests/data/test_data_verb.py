import json
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner
from image_files import write_folder, write_image

from thrifty.cli.data import command
from thrifty.core.errors import UsageError
from thrifty.data import skipped_files
from thrifty.data.text.text_inspection import document_lengths, histogram


def run(*arguments):
    result = CliRunner().invoke(command, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def test_list_shows_sets_and_their_presence(cache):
    listed = json.loads(run("list", "--json").stdout)
    assert listed["cache"] == str(cache)
    by_name = {entry["name"]: entry for entry in listed["entries"]}
    assert by_name["python-stdlib"]["present"] and not by_name["kjv"]["present"]
    assert by_name["smollm2-135m"]["kind"] == "model" and by_name["kjv"]["licence"].startswith("public domain")
    assert "thrifty data get kjv" in run("list").stdout


def test_get_of_python_sources_downloads_nothing(cache):
    assert json.loads(run("get", "python-stdlib", "--json").stdout)["entries"][0]["present"]
    assert not cache.exists()


def test_get_checks_all_names_before_a_download(cache):
    with pytest.raises(UsageError, match="did you mean 'kjv'"):
        run("get", "moby-dick", "kvj")
    assert not cache.exists()


def test_look_describes_a_source(stories):
    (stories / "copy.txt").write_text((stories / "07.txt").read_text())
    options = ["--vocabulary", "300", "--held-out", "0.2", "--length", "20"]
    seen = json.loads(run("look", stories, *options, "--examples", "2", "--json").stdout)
    assert sum(seen["documents"].values()) == 61
    assert seen["duplicates"] == pytest.approx(1 / 61)
    assert sum(bucket["documents"] for bucket in seen["lengths"]) == 61
    assert seen["vocabulary"] == 300 and len(seen["examples"]) == 2
    shown = run("look", stories, *options).stdout
    assert "unigram entropy" in shown and "── example 3" in shown and "█" in shown


def test_look_works_on_text_shorter_than_an_example(tmp_path):
    (tmp_path / "short.txt").write_text("A short text, but a text.")
    seen = json.loads(run("look", tmp_path / "short.txt", "--json").stdout)
    assert len(seen["examples"]) == 1 and seen["examples"][0].startswith("A short")


def test_an_empty_source_is_not_the_working_folder(stories):
    for verb in ("look", "preview"):
        with pytest.raises(UsageError, match="the source is empty"):
            run(verb, "")


def test_look_reports_the_number_of_kept_names(tmp_path, monkeypatch):
    monkeypatch.setattr(skipped_files, "KEPT", 6)
    folder = write_folder(tmp_path / "set")
    for number in range(8):
        (folder / "dark" / f"{number}.jpg").write_text("no image")
    assert "and 3 more, of which --json lists 1" in run("look", folder, "--size", "8", "--held-out", "0.3").stdout


def test_look_describes_images_with_and_without_labels(tmp_path):
    folder = write_folder(tmp_path / "set")
    (folder / "dark" / "empty.png").write_bytes(b"")
    seen = json.loads(run("look", folder, "--size", "8", "--held-out", "0.3", "--json").stdout)
    assert sum(own["dark"] for own in seen["labels"].values()) == 12 and seen["left_out"] == 1
    for number in range(6):
        (folder / "dark" / f"{number}.jpg").write_text("no image")
    seen = json.loads(run("look", folder, "--size", "8", "--held-out", "0.3", "--json").stdout)
    assert sorted(name.partition(":")[0] for name in seen["named"]) == [
        *(f"dark/{number}.jpg" for number in range(6)),
        "dark/empty.png",
    ]
    stdout_text = run("look", folder, "--size", "8", "--held-out", "0.3").stdout
    assert "and 2 more, listed by --json" in stdout_text and stdout_text.count("not an image of a known format") == 5
    write_image(tmp_path / "flat" / "deep" / "a.png", seed=8)
    for number in range(20):
        write_image(tmp_path / "flat" / f"{number}.png", seed=number)
    shown = run("look", tmp_path / "flat", "--held-out", "0.3").stdout
    assert "images of 64 x 64 pixels" in shown and "no labels" in shown
    assert "all images have the label 'deep'" in shown and "label entropy" not in shown


def test_look_describes_images_with_captions(tmp_path):
    for number in range(20):
        write_image(tmp_path / f"{number}.png", seed=number)
        (tmp_path / f"{number}.txt").write_text("a picture\nnoise of sixty shades of grey\n")
    (tmp_path / "alone.txt").write_text("nothing")
    options = ["--size", "8", "--held-out", "0.3", "--length", "9", "--vocabulary", "270"]
    seen = json.loads(run("look", tmp_path, *options, "--json").stdout)
    assert sum(seen["images"].values()) == 20 and sum(seen["captions"].values()) == 40
    assert seen["left_out"] == {"captions without an image": 1} and 0 < seen["cut"] < 1
    assert seen["examples"] == [["a picture", "noise of sixty shades of grey"]] * 3
    shown = run("look", tmp_path, *options, "--examples", "1").stdout
    assert "captions without an image: 1" in shown and "alone.txt: no image" in shown
    assert "a picture | noise of sixty shades of grey" in shown and "of the captions have more than 8 tokens" in shown


def test_lengths_are_counted_between_powers_of_two():
    lengths = document_lengths(np.array([5, 5, 0, 0, 5, 5, 5, 5, 0], dtype=np.uint16), 0)
    assert lengths.tolist() == [2, 0, 4]
    buckets = [(bucket.low, bucket.high, bucket.documents) for bucket in histogram(lengths)]
    assert buckets == [(0, 1, 1), (1, 2, 0), (2, 4, 1), (4, 8, 1)]


def test_help_does_not_import_torch():
    program = "import sys; from thrifty.cli.data import command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
