"""What version 06da109 wrote before techniques, settings and objectives were renamed: two run folders, a comparison.

Both runs were finished; their last checkpoints were taken out, so that they resume at step 4 of 8. `ends.json` keeps
how 06da109 itself ended them: the digest of all tensors of the last checkpoint, and the loss of every step.
"""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch

from thrifty.core.errors import UsageError
from thrifty.dashboard.run_summary import RunSummary
from thrifty.experiments.past_results import evidence
from thrifty.recipes.recipe_toml import read_recipe
from thrifty.reporting.comparison_page import write_comparison_page
from thrifty.reporting.run_page import write_report
from thrifty.reporting.run_record import read_run
from thrifty.training import checkpoint
from thrifty.training.run_environment import environment
from thrifty.training.trained_model import load_trained_model
from thrifty.training.trainer import resume

WRITTEN = Path(__file__).parent / "written_by_06da109"
ENDS = json.loads((WRITTEN / "ends.json").read_text())
RUNS = ["old-text", "old-image"]
RENAMED = {
    "old-text": ("averaging.ema", "curriculum.sequence_length", "gradients.clip", "measure.noise_scale"),
    "old-image": ("averaging.latest", "curriculum.patch_size", "measure.noise_scale", "optimizers.layerwise_lr_decay"),
}
OLD = ("large_batch.exponential", "large_batch.latest", "growth.sequence", "growth.patch", "optimizers.clip")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(WRITTEN, tmp_path / "written", dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path / "written")
    return tmp_path / "written"


@pytest.mark.parametrize("name", RUNS)
def test_a_run_resumes_and_ends_as_it_did_then(folder: Path, name: str) -> None:
    summary = resume(folder / name, read_recipe(folder / name / "recipe.toml"), quiet=True)
    assert summary["status"] == "finished"
    losses = {row["step"]: row["loss"] for row in read_run(folder / name).steps}
    if [environment("cpu")["cpu"], torch.backends.cpu.get_cpu_capability()] == ENDS[name]["cpu"]:
        assert [losses[step] for step in range(1, 9)] == ENDS[name]["losses"]
        assert _digest(checkpoint.load(folder / name / "checkpoints", 8).tensors) == ENDS[name]["tensors_sha256"]
    else:  # processors of another kind add up in another order
        assert [losses[step] for step in range(1, 9)] == pytest.approx(ENDS[name]["losses"], rel=1e-4)
    kept = (folder / name / "recipe.toml").read_text()
    assert not any(old in kept for old in OLD)


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("name", RUNS)
def test_reports_show_names_of_today(folder: Path, name: str) -> None:
    record = read_run(folder / name)
    explained = [entry["name"] for entry in record.explanation["techniques"]]
    assert set(RENAMED[name]) <= set(explained)
    assert set(RENAMED[name]) <= set(RunSummary(name, folder / name).refresh().techniques)
    page = write_report(folder / name).read_text()
    for technique in RENAMED[name]:
        assert technique in page
    for text in (record.recipe_text, json.dumps(record.origins), json.dumps(record.explanation)):
        assert not any(old in text for old in OLD)


@pytest.mark.parametrize("name", RUNS)
def test_the_trained_model_loads(folder: Path, name: str) -> None:
    model, recipe = load_trained_model(folder / name)
    assert recipe.objective.name == {"old-text": "next_token", "old-image": "classification"}[name]
    assert sum(parameter.numel() for parameter in model.parameters()) > 1000


def test_a_fork_takes_over_what_techniques_remember(folder: Path) -> None:
    recipe = read_recipe(folder / "old-text" / "recipe.toml")
    resume(folder / "old-text", recipe, fork="forked", quiet=True)
    notices = [event["text"] for event in read_run(folder / "forked").events if event["kind"] == "notice"]
    assert not [text for text in notices if "start fresh" in text]


def test_a_recipe_that_is_no_longer_in_a_run_folder_is_refused_with_the_name_of_today(folder: Path) -> None:
    shutil.copy(folder / "old-text" / "recipe.toml", folder / "mine.toml")
    with pytest.raises(UsageError, match="did you mean"):
        read_recipe(folder / "mine.toml")


def test_a_comparison_reads(folder: Path) -> None:
    (folder / "race").mkdir()
    shutil.move(folder / "comparison.json", folder / "race" / "comparison.json")
    past = evidence(folder)
    assert {entry.technique for entry in past} >= {"gradients.clip", "averaging.ema"}
    assert not any(old in entry.in_words() for entry in past for old in OLD)
    assert "clipped" in write_comparison_page(folder / "race").read_text()
