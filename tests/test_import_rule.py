"""Who may import whom, and what no file may use: the table of DESIGN.md, checked."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "src").rglob("*.py"))


def test_the_import_table_holds() -> None:
    found = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout + found.stderr


def modules(path: Path) -> set[str]:
    """Everything that a file imports, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports here are absolute"
            found.add(node.module or "")
    return found


def test_no_test_imports_another() -> None:
    own = {path.stem for path in (ROOT / "tests").rglob("*.py") if path.parent.name != "support"}
    own |= {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()}
    for path in (ROOT / "tests").rglob("*.py"):
        assert not {name.split(".")[0] for name in modules(path)} & own, path


def test_core_needs_torch_and_the_standard_library_only() -> None:
    for path in FILES:
        if path.parent.name == "core":
            outside = {name.split(".")[0] for name in modules(path)} - set(sys.stdlib_module_names)
            assert outside <= {"torch", "thrifty", "safetensors"}, path


def test_pages_are_drawn_from_a_run_folder_without_torch() -> None:
    for path in FILES:
        if path.parent.name == "reporting":
            assert not any(name.split(".")[0] == "torch" for name in modules(path)), path


def test_no_file_can_run_what_it_reads() -> None:
    """No pickles, by whatever door they come in, no eval, no shell."""
    offenders = {str(path.relative_to(ROOT)): found for path in FILES if (found := unsafe_uses(path))}
    assert not offenders


def test_what_runs_what_it_reads_is_found(tmp_path: Path) -> None:
    for line, name in {
        "import pickle": "pickle",
        "import torch; torch.load(file)": "torch.load",
        "dist.all_gather_object(values, value)": "dist.all_gather_object",
        "subprocess.run(words, shell=True)": "shell=True",
        "np.load(file, allow_pickle=wanted)": "allow_pickle=wanted",
    }.items():
        (path := tmp_path / "careless.py").write_text(line)
        assert unsafe_uses(path) == [name]
    path.write_text("subprocess.run(words, shell=False)")
    assert not unsafe_uses(path)


def unsafe_uses(path: Path) -> list[str]:
    """List the imports, calls and options of a file that can run code from data."""
    offenders = sorted(modules(path) & {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"})
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
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
