"""The import rule: host and export may import runtime; export does not import host; runtime imports neither."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED_IN_RUNTIME = {"runtime", "executorch", "torch", "numpy", "safetensors"} | sys.stdlib_module_names


def imported_packages(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("path", sorted((ROOT / "runtime").glob("**/*.py")), ids=lambda p: p.name)
def test_runtime_imports_only_what_a_phone_has(path):
    assert imported_packages(path) <= ALLOWED_IN_RUNTIME


@pytest.mark.parametrize("path", sorted((ROOT / "export").glob("**/*.py")), ids=lambda p: p.name)
def test_export_does_not_import_host(path):
    assert "host" not in imported_packages(path)


def test_training_loads_neither_the_workstation_nor_its_libraries():
    code = "import sys, runtime.trainer; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert not loaded & {"host", "export", "diffusers", "transformers", "peft", "accelerate", "PIL"}


@pytest.mark.parametrize(
    ("api", "home"), [("executorch.exir", "export/lower.py"), ("executorch.extension", "runtime/programs.py")]
)
def test_each_experimental_api_lives_in_one_file(api, home):
    users = {
        str(path.relative_to(ROOT))
        for package in ("host", "export", "runtime")
        for path in (ROOT / package).glob("**/*.py")
        if api in path.read_text(encoding="utf-8").replace("`", "").split('"""', 2)[-1]
    }
    assert users == {home}
