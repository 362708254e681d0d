"""The import rule of DESIGN.md, and names that no file may use."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import grimp
import pytest
from tools.import_rule import DESIGN, Import, imports_of, offences, read_rule

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "src").rglob("*.py"))


@pytest.mark.slow  # `make test` has run it as lint
def test_the_import_table_holds() -> None:
    found = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout + found.stderr


@cache
def imports() -> frozenset[Import]:
    return frozenset(imports_of(grimp.build_graph("thrifty", cache_dir=None)))


OFFENCES = [
    ("core.state", "optim.torch_optimizer", "core may not import optim"),
    ("data.catalogue", "data.text.text_data", "data may not import data/text"),
    ("data.images.digits", "data.text.text_data", "data/images may not import data/text"),
    ("experiments.study", "memory.planner.bit_allocation", "experiments may not import memory"),
    ("techniques.optimizers.lion", "techniques.optimizers.adafactor", "no technique imports another"),
    ("techniques.optimizers.lion", "techniques.schedules._warmup", "it is private to thrifty.techniques.schedules"),
    ("training.loop", "models.transformer", "the loop knows no models, objectives, data or recipes"),
    ("training.loop", "data.text.text_data", "the loop knows no models, objectives, data or recipes"),
    ("cli.train", "cli.plan.plan_verb", "no verb imports another"),
    ("cli.plan.plan_verb", "cli.train", "no verb imports another"),
]


@pytest.mark.parametrize(("importer", "imported", "reason"), OFFENCES)
def test_an_offence_put_back_is_noticed(importer: str, imported: str, reason: str) -> None:
    offence = (f"thrifty.{importer}", f"thrifty.{imported}")
    assert offence not in imports() and {*offence} <= {module for pair in imports() for module in pair}
    sentences = offences({*imports(), offence}, read_rule(DESIGN.read_text(encoding="utf-8")))
    assert f"{offence[0]} imports {offence[1]}: {reason}" in sentences


def test_a_circle_inside_a_package_is_noticed() -> None:
    upper, lower = min(pair for pair in imports() if all(module.startswith("thrifty.training.") for module in pair))
    sentences = offences({*imports(), (lower, upper)}, read_rule(DESIGN.read_text(encoding="utf-8")))
    assert any(s.startswith("import circle") and upper in s and lower in s for s in sentences)


def test_a_row_names_only_rows_above_it() -> None:
    table = "## Import table\n| package | what | may import |\n| `core` | a | `optim` |\n| `optim` | b | |\n"
    with pytest.raises(ValueError, match="no row above it names"):
        read_rule(table)


@cache
def syntax_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def repeated_classes(trees: Iterable[ast.Module]) -> list[str]:
    """Names that more than one class of the package has."""
    names = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return sorted(name for name, count in names.items() if count > 1)


def repeated_modules(paths: list[str]) -> list[str]:
    """Names that several modules have, but for files named by a technique, a design, a study or a verb."""
    named_by_thing = ("techniques/", "simulators/accelerator/designs/", "experiments/studies/", "cli/")
    stems = Counter(Path(path).stem for path in paths if not path.startswith(named_by_thing))
    return sorted(stem for stem, count in stems.items() if count > 1 and stem != "__init__")


def test_names_of_classes_and_modules_are_unique() -> None:
    trees = [syntax_of(path) for path in FILES]
    paths = [path.relative_to(ROOT / "src/thrifty").as_posix() for path in FILES]
    assert not repeated_classes(trees)
    assert not repeated_modules(paths)
    assert repeated_classes([*trees, ast.parse("class TrainState: ...")]) == ["TrainState"]
    assert repeated_modules([*paths, "planning/state.py"]) == ["state"]


def modules(path: Path) -> set[str]:
    """Everything that a file imports, wherever in the file."""
    return modules_of(ast.walk(syntax_of(path)))


def modules_of(nodes: Iterable[ast.AST]) -> set[str]:
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports here are absolute"
            names.add(node.module or "")
    return names


def test_no_test_imports_another() -> None:
    own = {path.stem for path in (ROOT / "tests").rglob("*.py") if path.parent.name != "support"}
    own |= {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()}
    for path in (ROOT / "tests").rglob("*.py"):
        named = re.findall(r"^\s*(?:from|import) +(\w+)", path.read_text(encoding="utf-8"), flags=re.M)
        assert not own.intersection(named), path


def test_core_needs_torch_numpy_and_the_standard_library_only() -> None:
    for path in FILES:
        if path.parent.name == "core":
            outside = {name.split(".")[0] for name in modules(path)} - set(sys.stdlib_module_names)
            assert outside <= {"torch", "numpy", "thrifty", "safetensors"}, path


@pytest.mark.parametrize("module", ["thrifty", "thrifty.cli.main"])
def test_the_package_and_its_help_import_no_torch(module: str) -> None:
    program = f"import sys, {module}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_a_run_of_one_process_imports_nothing_of_dtensors() -> None:
    """Which takes more than half as long as torch itself."""
    for path in FILES:
        if path.parent.name not in ("distributed", "parallelism"):
            at_import = [node for node in syntax_of(path).body if isinstance(node, ast.Import | ast.ImportFrom)]
            assert "torch.distributed.tensor" not in modules_of(at_import), path


def test_pages_are_drawn_from_a_run_folder_without_torch() -> None:
    for path in FILES:
        if path.parent.name == "reporting":
            assert not any(name.split(".")[0] == "torch" for name in modules(path)), path


def test_no_file_can_run_what_it_reads() -> None:
    """No pickles, by whatever door they come in, no eval, no shell; but for values of one's own to one's own processes,
    in private files."""
    offenders = {str(path.relative_to(ROOT)): found for path in FILES if (found := unsafe_uses(path))}
    assert offenders == {"src/thrifty/training/sent_objects.py": ["pickle"]}


def test_what_runs_what_it_reads_is_found(tmp_path: Path) -> None:
    for line, name in {
        "import pickle": "pickle",
        "import torch; torch.load(file)": "torch.load",
        "dist.all_gather_object(values, value)": "dist.all_gather_object",
        "subprocess.run(words, shell=True)": "shell=True",
        "np.load(file, allow_pickle=wanted)": "allow_pickle=wanted",
    }.items():
        (path := tmp_path / f"{name}.py").write_text(line)
        assert unsafe_uses(path) == [name]
    (careful := tmp_path / "careful.py").write_text("subprocess.run(words, shell=False)")
    assert not unsafe_uses(careful)


def unsafe_uses(path: Path) -> list[str]:
    """List the imports, calls and options of a file that can run code from data."""
    offenders = sorted(modules(path) & {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"})
    for node in ast.walk(syntax_of(path)):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in ("torch.load", "torch.save", "eval", "exec", "os.system", "os.popen") or called.endswith(
            ("broadcast_object_list", "all_gather_object", "scatter_object_list")
        ):
            offenders.append(called)
        for keyword in node.keywords:
            value = keyword.value
            if keyword.arg in ("shell", "trust_remote_code", "allow_pickle") and not (
                isinstance(value, ast.Constant) and value.value is False
            ):
                offenders.append(f"{keyword.arg}={ast.unparse(value)}")
    return offenders
