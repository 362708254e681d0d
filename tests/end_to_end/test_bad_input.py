"""Bad input has one clear message with a fix and its exit code, and nothing is lost."""

import io
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
from command_line import CommandLine, assert_equal, kill, wait_until

USAGE, INFEASIBLE, INTEGRITY = 2, 3, 4


def refused(thrifty: CommandLine, *words: str | Path, exit_code: int = USAGE, says: tuple[str, ...]) -> str:
    """Return the message of a failing command: the error on one line, the fix on the next, no traceback."""
    done = thrifty(*words, exit_code=exit_code)
    assert "Traceback" not in done.stderr and done.stdout == ""
    message = done.stderr[done.stderr.index("thrifty: ") :]
    for part in says:
        assert part in message, message
    what, fix = message.rstrip("\n").split("\n")
    assert what.startswith("thrifty: ") and fix.startswith("  fix: ")
    return message


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--set", "data.btach=4"), ("unknown key 'data.btach'", "did you mean 'batch'")),
        (("--set", "speed=4"), ("unknown key 'speed'",)),
        (("--with", "optimizers.adamw:rate=1"), ("unknown key 'techniques.optimizers.adamw.rate'",)),
        (("--with", "optimizer.lion"), ("no technique 'optimizer.lion'", "did you mean 'optimizers.lion'")),
        (("--without", "optimizers.lion"), ("the recipe does not use it",)),
        (("--set", "data.batch=many"), ("data.batch must be a whole number, not 'many'",)),
        (("--set", "data.batch=2.5"), ("data.batch must be a whole number, not 2.5",)),
        (("--with", "optimizers.adamw:lr=fast"), ("techniques.optimizers.adamw.lr must be a number, not 'fast'",)),
        (("--set", "model.preset=lama-nano"), ("no preset 'lama-nano'", "did you mean 'llama-nano'")),
        (("--set", "model.width=30"), ("width 30 does not divide into 4 heads",)),
        (("--with", "muon", "--with", "lion"), ("both decide the optimizer", "--without optimizers.lion")),
        (("--with", "adapters.lora", "--with", "sparsity.rigl"), ("cannot be combined",)),
        (("--data", "nowhere.txt"), ("nowhere.txt",)),
        (("--data", ""), ("has no data to train on", "--data my.txt")),
        (("--data", "empty.txt"), ("empty.txt",)),
        (("--data", "binary.txt"), ("binary.txt", "binary")),
        (("--data", "table.csv"), ("table.csv, line 2: no column 'text'; there are: a, b", "--set data.column=a")),
        (("--data", "broken.jsonl"), ("broken.jsonl",)),
        (("--set", "data.batch=100000"), ("fewer than one batch of 100000", "--set data.batch=")),
        (("--budget", "soon"), ("'soon' is not an amount",)),
        (("--budget", "-5steps"), ("'-5steps' is not an amount",)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_a_wrong_recipe_is_refused_with_the_smallest_fix(
    thrifty: CommandLine, words: tuple[str, ...], says: tuple[str, ...]
) -> None:
    (thrifty.folder / "empty.txt").touch()
    (thrifty.folder / "binary.txt").write_bytes(bytes(range(256)) * 64)
    (thrifty.folder / "table.csv").write_text("a,b\n1,2\n")
    (thrifty.folder / "broken.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    refused(thrifty, *thrifty.recipe("run", *words), says=says)
    assert not (thrifty.run("run") / "recipe.toml").exists()


def test_the_name_of_a_refused_run_can_be_used_again(thrifty: CommandLine) -> None:
    refused(thrifty, *thrifty.recipe("run", "--data", "nowhere.txt"), says=("nowhere.txt",))
    assert thrifty.train("run", steps=2)["status"] == "finished"


@pytest.mark.parametrize("budget", ["100tokens", "0.01s"])
def test_a_budget_below_one_step_is_refused_with_a_larger_one(thrifty: CommandLine, budget: str) -> None:
    says = ("is less than one step", "--budget")
    refused(thrifty, *thrifty.recipe("run", "--budget", budget), exit_code=INFEASIBLE, says=says)


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files except unfinished ones of a kill, which the next command removes."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".partial"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="session")
def stopped(common_folder: Path) -> Path:
    """Return the folder of a run that was killed, with checkpoints of steps 4 and 8."""
    thrifty = CommandLine(common_folder)
    often = {"checkpoints__every": 4, "evaluation__every": 400}
    process = thrifty.start(*thrifty.recipe("stopped", "--quiet", "--name", "run", steps=400, **often))
    saved = thrifty.run("run") / "checkpoints"
    assert wait_until(lambda: (saved / "step-00000008").is_dir(), process)
    os.kill(process.pid, signal.SIGSTOP)
    newer = [path for path in saved.iterdir() if path.is_dir() and path.name > "step-00000008"]
    kill(process)
    for path in newer:
        shutil.rmtree(path)
    assert (saved / "step-00000004").is_dir()
    return thrifty.run("run")


@pytest.fixture
def trained(thrifty: CommandLine, stopped: Path) -> CommandLine:
    shutil.copytree(stopped, thrifty.run("run"))
    return thrifty


def test_run_folders_and_recipes_are_not_overwritten(trained: CommandLine) -> None:
    before = contents(trained.run("run"))
    refused(trained, *trained.recipe("run"), says=("exists already", "another --name", "thrifty resume"))
    changes = ("--set", "data.batch=4", "--with", "gradients.clip:max_norm=2.0", "--set", "evaluation.every=7")
    says = ("data.batch: 8 → 4", "techniques.gradients.clip", "--fork NAME")
    message = refused(trained, "resume", "run", *changes, says=says)
    assert "evaluation.every" not in message
    after = contents(trained.run("run"))
    assert {name: text for name, text in after.items() if name != "lock"} == {
        name: text for name, text in before.items() if name != "lock"
    }
    refused(trained, "resume", "nun", says=("there is no run 'nun'", "did you mean 'run'"))


def test_a_fork_continues_by_the_changed_recipe(trained: CommandLine) -> None:
    before = contents(trained.run("run") / "checkpoints")
    step = max(int(path.name[5:]) for path in (trained.run("run") / "checkpoints").glob("step-*"))
    refused(
        trained, "resume", "run", "--fork", "new", "--set", "budget.steps=4", says=(f"has made {step}", "budget.steps=")
    )
    changes = ("--set", "data.batch=4", "--set", f"budget.steps={step + 6}")
    summary = trained.json("resume", "run", "--fork", "new", *changes)
    assert summary["steps"] == step + 6
    assert [record["step"] for record in trained.records("new")] == list(range(step + 1, step + 7))
    taken, data = (record["text"] for record in trained.records("new", "notice")[:2])
    assert f"forked from runs/run/checkpoints/step-{step:08d}" in taken
    assert data.startswith(f"the data continue at example {4 * step}") and data.endswith(f"example {8 * step}")
    origins = json.loads((trained.run("new") / "origins.json").read_text())
    assert origins["data.batch"] == "--set" and origins["data.length"] == "--set"
    assert contents(trained.run("run") / "checkpoints") == before


def test_a_killed_run_is_shown_as_killed_until_resumed(trained: CommandLine) -> None:
    report = trained.json("report", "run")
    assert report["status"] == "killed" and "was killed after step" in report["verdict"]
    process = trained.start("resume", "run", stderr=subprocess.STDOUT)
    assert wait_until(lambda: len(trained.records("run", "notice")) > 0, process)
    assert trained.json("report", "run")["status"] == "running"
    kill(process)
    assert "ended without releasing the lock of this run" in trained.records("run", "notice")[-1]["text"]


def test_a_missing_recipe_file_is_replaced_from_the_checkpoint(
    trained: CommandLine,
) -> None:
    recipe = trained.run("run") / "recipe.toml"
    content = recipe.read_text()
    recipe.unlink()
    trained("export", "run", "model")
    refused(trained, "resume", "run", "--set", "data.batch=4", says=("data.batch: 8 → 4",))
    process = trained.start("resume", "run", stderr=subprocess.STDOUT)
    assert wait_until(recipe.is_file, process)
    kill(process)
    assert recipe.read_text() == content
    recipe.write_bytes(b"\xff")
    refused(trained, "resume", "run", says=("is not TOML", "rm runs/run/recipe.toml"))


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def edit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "file"), [(cut, "tensors.safetensors"), (edit, "tensors.safetensors"), (edit, "state.json")]
)
def test_a_damaged_checkpoint_is_reported_and_skipped(trained: CommandLine, damage: Any, file: str) -> None:
    saved = trained.run("run") / "checkpoints"
    newest = max(saved.glob("step-*"))
    older = min(saved.glob("step-*"))
    assert newest != older
    damage(newest / file)
    process = trained.start("resume", "run", "--set", "checkpoints.every=1", stderr=subprocess.STDOUT)
    assert wait_until(lambda: len(trained.records("run", "notice")) > 0, process)
    kill(process)
    notice = trained.records("run", "notice")[0]
    assert notice["step"] == int(older.name[5:]) and f"{newest.name} is damaged" in notice["text"]
    assert file in notice["text"] and (saved / "quarantine" / newest.name).is_dir()


def test_damage_of_all_checkpoints_is_an_integrity_error(trained: CommandLine) -> None:
    for file in trained.run("run").glob("checkpoints/step-*/state.json"):
        edit(file)
    before = contents(trained.run("run") / "checkpoints")
    says = ("no undamaged checkpoint is left", "state.json has changed", "from a backup")
    refused(trained, "resume", "run", exit_code=INTEGRITY, says=says)
    assert contents(trained.run("run") / "checkpoints") == before


class Bomb:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def write_pickle_bomb(file: Path) -> Path:
    """Write a checkpoint as torch.save does whose loading would create a folder; return the path of that folder."""
    marker = file.with_name("marker")
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Bomb(marker)))
    file.write_bytes(content.getvalue())
    return marker


def test_a_pickle_in_place_of_checkpoints_is_refused_unopened(trained: CommandLine) -> None:
    saved = trained.run("run") / "checkpoints"
    shutil.rmtree(saved)
    saved.mkdir()
    marker = write_pickle_bomb(saved / "model.pt")
    refused(trained, "resume", "run", says=("'model.pt', and pickles are refused", "safetensors"))
    refused(trained, "export", "run", "out", says=("'model.pt', and pickles are refused",))
    assert not marker.exists()


def test_a_pickled_model_is_refused_unopened(thrifty: CommandLine) -> None:
    stranger = thrifty.folder / "stranger"
    stranger.mkdir()
    (stranger / "config.json").write_text(json.dumps(GPT2))
    marker = write_pickle_bomb(stranger / "pytorch_model.bin")
    data = str((thrifty.folder / "corpus").resolve())
    small = ("--set", "data.vocabulary=300", "--set", "data.length=16", "--budget", "2steps")
    refused(
        thrifty,
        "train",
        "text",
        "--data",
        data,
        "--model",
        "stranger",
        *small,
        says=("pytorch_model.bin", "safetensors"),
    )
    assert not marker.exists()
    marker = write_pickle_bomb(thrifty.folder / "model.pt")
    refused(thrifty, "train", "text", "--data", data, "--set", "model.folder=model.pt", *small, says=("model.pt",))
    refused(thrifty, "sample", "model.pt", says=("model.pt",))
    assert not marker.exists()


GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 32, "vocab_size": 300}


@pytest.mark.slow
def test_a_full_disk_keeps_earlier_checkpoints(thrifty: CommandLine) -> None:
    """A limit on file sizes: writes beyond it fail as on a full disk."""
    thrifty.train("whole", steps=12)
    process = thrifty.start(
        *thrifty.recipe("run", "--quiet", steps=12, checkpoints__every=4, evaluation__every=400),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30)),
    )
    assert wait_until(lambda: (thrifty.run("run") / "checkpoints" / "step-00000004").is_dir(), process)
    room = (thrifty.run("run") / "checkpoints" / "step-00000004" / "tensors.safetensors").stat().st_size // 2
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (room, room))
    stderr = process.communicate(timeout=60)[1]
    assert process.returncode == 1 and "Traceback" not in stderr
    assert "the disk is full: step" in stderr and "bytes missing" in stderr and "then `thrifty resume`" in stderr
    assert thrifty.json("resume", "run")["status"] == "finished"
    assert_equal(thrifty.tensors("run"), thrifty.tensors("whole"))


def can_mount() -> bool:
    return (
        shutil.which("unshare") is not None
        and not subprocess.run(
            ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True
        ).returncode
    )


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="this system lets nobody mount a small disk of their own")
def test_a_small_disk_keeps_the_last_checkpoint(
    thrifty: CommandLine,
) -> None:
    words = " ".join(thrifty.recipe("run", "--quiet", "--runs", "small", steps=400, checkpoints__every=2))
    words = words.replace('"', '\\"')
    script = f"""
        mkdir small && mount -t tmpfs -o size=100m none small
        (while [ ! -e small/run/checkpoints/LATEST ]; do sleep 0.05; done; cat /dev/zero > small/full) 2> /dev/null &
        {{ {shutil.which("python3") and os.sys.executable} -m thrifty {words}; }} 2> error.txt; echo $?
        cp -r small/run kept
    """
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script],
        cwd=thrifty.folder,
        env=thrifty.variables(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    error = (thrifty.folder / "error.txt").read_text()
    assert done.stdout.split() == ["1"], (done, error)
    assert "Traceback" not in error and "fix: free" in error
    kept = CommandLine(thrifty.folder)
    process = kept.start("resume", "kept")
    assert wait_until(lambda: len((thrifty.folder / "kept/records.jsonl").read_bytes()) > 0, process)
    kill(process)


def test_a_mesh_of_too_many_ranks_is_refused(thrifty: CommandLine) -> None:
    says = ("requires 2 ranks, and this start has 1", "torchrun --nproc-per-node 2", "--mesh tensor=1")
    refused(thrifty, *thrifty.recipe("run", "--mesh", "tensor=2"), says=says)
    assert not thrifty.run("run").exists()
