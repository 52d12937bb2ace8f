"""The distribution: what is in the wheel, that it works beside a user's ``train.py`` and ``data/``, and the pins."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ["data", "heads", "infer", "train"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PINS = dict(
    line.split("==") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if "==" in line
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy so that nothing is left in the checkout."""
    source = tmp_path_factory.mktemp("source")
    for folder in [*PACKAGES, "configs", "tests"]:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ["headstart.py", "pyproject.toml", "README.md", "LICENSE"]:
        shutil.copy(ROOT / file, source / file)
    out = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), str(source))
    (built,) = out.glob("headstart-*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed."""
    folder = tmp_path_factory.mktemp("site")
    pip("install", "--no-deps", "--no-index", "--target", str(folder), str(wheel))
    return folder


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A user's folder with a ``train.py`` and a ``data/`` of their own, which must never be run."""
    (tmp_path / "train.py").write_text("raise SystemExit('the user\\'s train.py was run')\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "__init__.py").write_text("raise SystemExit('the user\\'s data was imported')\n")
    return tmp_path


def pip(*args: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *args]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def run(site: Path, cwd: Path, *command: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | {"PYTHONPATH": str(site)}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def held(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as file:
        return {name for name in file.namelist() if ".dist-info/" not in name}


def test_wheel_holds_the_packages_whole_and_no_tests(wheel: Path) -> None:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()]
    ours = {path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts}
    recipes = [path for path in (ROOT / "configs").rglob("*") if path.is_file()]
    ours |= {f"train/{path.relative_to(ROOT).as_posix()}" for path in recipes}
    assert held(wheel) == ours | {"headstart.py"}
    assert {"data/sample/train.jsonl.gz", "train/configs/quickstart.yaml"} <= ours


def test_console_command_beside_own_train_and_data(site: Path, elsewhere: Path) -> None:
    command = [sys.executable, str(site / "bin" / "headstart"), "data", "prepare", "--help"]
    assert "--max-length" in run(site, elsewhere, *command)


def test_module_beside_own_train_and_data(site: Path, elsewhere: Path) -> None:
    """``python -m`` puts the working directory first; headstart.py takes it off again."""
    assert "example: headstart quickstart" in run(site, elsewhere, sys.executable, "-m", "headstart", "--help")


def test_launched_script_beside_own_train_and_data(site: Path, elsewhere: Path) -> None:
    """It finds its own packages and recipes, whatever lies in the working directory."""
    shown = run(site, elsewhere, sys.executable, str(site / "train" / "train_heads.py"), "--help")
    assert "Settings, with the quickstart recipe's values" in shown


def test_infer_is_imported_beside_own_train_and_data(site: Path, elsewhere: Path) -> None:
    """What users import in their own scripts needs neither of the two names they may have taken."""
    (elsewhere / "mine.py").write_text("import heads, infer\nprint(infer.__file__)\n")
    assert Path(run(site, elsewhere, sys.executable, "mine.py").strip()) == site / "infer" / "__init__.py"


def test_python_and_lower_bounds() -> None:
    project = PROJECT["project"]
    assert project["requires-python"] == ">=3.11"
    assert project["scripts"] == {"headstart": "headstart:main"}
    assert {"deepspeed", "wandb", "tensorboard", "trackio", "demo", "dev"} <= project["optional-dependencies"].keys()
    assert [need for need in project["dependencies"] if "==" in need or "<" in need] == []


def test_everything_asked_for_is_pinned_for_the_tests() -> None:
    project = PROJECT["project"]
    asked = [*project["dependencies"], *(need for extra in project["optional-dependencies"].values() for need in extra)]
    names = {re.split(r"[<>=\[]", need)[0].lower().replace("_", "-") for need in asked}
    pinned = {name.lower().replace("_", "-") for name in PINS}
    assert names - pinned == set()
    assert [version for version in PINS.values() if "+" in version] == []


def test_what_runs_is_what_is_pinned() -> None:
    import torch
    import transformers

    assert torch.__version__.split("+")[0] == PINS["torch"]
    assert transformers.__version__ == PINS["transformers"]
