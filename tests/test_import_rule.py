"""Who may import whom, and what no file may use: the table of DESIGN.md, checked."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_core_needs_torch_and_the_standard_library_only() -> None:
    for path in FILES:
        if path.parent.name == "core":
            outside = {name.split(".")[0] for name in modules(path)} - set(sys.stdlib_module_names)
            assert outside <= {"torch", "thrifty", "safetensors"}, path


def test_pages_are_drawn_from_a_run_folder_without_torch() -> None:
    for path in FILES:
        if path.parent.name == "reporting":
            assert not any(name.split(".")[0] == "torch" for name in modules(path)), path


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT / "src")) for path in FILES])
def test_no_file_can_run_what_it_reads(path: Path) -> None:
    """No pickles, by whatever door they come in, no eval, no shell."""
    assert not modules(path) & {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        assert called not in ("torch.load", "torch.save", "eval", "exec", "os.system", "os.popen"), called
        assert not called.endswith(("broadcast_object_list", "all_gather_object", "scatter_object_list")), called
        options = {keyword.arg: keyword.value for keyword in node.keywords}
        for option in ("shell", "trust_remote_code", "allow_pickle"):
            value = options.get(option)
            assert value is None or (isinstance(value, ast.Constant) and value.value is False), f"{called}({option}=…)"
