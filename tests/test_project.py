"""The project around the code: documents, packaging, CI. What is written down must be so."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from helios.config import Settings, environment_name

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "helios"
README = (ROOT / "README.md").read_text(encoding="utf-8")
# Packages that `uv sync --no-dev` installs beside Helios on Linux, torch's CUDA libraries among them.
MOST_RUNTIME_PACKAGES = 60
# Distributions that are imported under another name, or are loaded by name or by another package.
IMPORTED_AS = {
    "python-dotenv": "pydantic_settings",
    "pydantic-settings": "pydantic_settings",
    "prometheus-client": "prometheus_client",
    "huggingface-hub": "huggingface_hub",
    "httptools": "uvicorn",
    "uvloop": "uvicorn",
}


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def update_docs() -> ModuleType:
    return load("tools/update_docs.py")


def test_generated_parts_of_the_documents_are_current(update_docs: ModuleType) -> None:
    """A setting or a file that came, went or changed must show: run tools/update_docs.py."""
    stale = [path.name for path, text in update_docs.documents().items() if path.read_text("utf-8") != text]
    assert stale == [], "run: uv run python tools/update_docs.py"


def table_rows() -> dict[str, str]:
    """Variables of README's settings table with the default it states."""
    rows = re.findall(r"^\| `((?:HELIOS|HF)_\w+)` \| (?:`([^`]*)`)? ?\|", README, re.MULTILINE)
    return dict(rows)


def env_lines() -> dict[str, str]:
    text = (ROOT / ".env.example").read_text(encoding="utf-8")
    return dict(re.findall(r"^#((?:HELIOS|HF)_\w+)=(.*)$", text, re.MULTILINE))


def test_every_setting_is_in_the_readme_and_the_example() -> None:
    """An undocumented knob does not exist for anyone."""
    names = {environment_name(field) for field in Settings.model_fields}
    assert set(table_rows()) == names
    assert set(env_lines()) == names


def test_documented_defaults_are_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Someone who copies the example and uncomments a line must get what was in force before."""
    for name in [name for name in os.environ if name.startswith(("HELIOS_", "HF_"))]:
        monkeypatch.delenv(name)
    plain = Settings(_env_file=None)  # pyright: ignore[reportCallIssue]
    for documented in (table_rows(), env_lines()):
        for name, value in documented.items():
            monkeypatch.setenv(name, value)
        assert Settings(_env_file=None) == plain  # pyright: ignore[reportCallIssue]
        for name in documented:
            monkeypatch.delenv(name)


def test_every_setting_says_what_it_is_for() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description, name


def test_every_source_file_is_listed_in_the_readme() -> None:
    """The list is how a reader finds the room; one that is wrong leads astray."""
    listed: list[str] = []
    folders: list[str] = []
    block = README.partition("<!-- files -->")[2].partition("<!-- /files -->")[0]
    for line in block.splitlines():
        if found := re.match(r"((?:  )+)([\w.]+\.py|\w+/)  ", line):
            depth = len(found[1]) // 2
            folders[depth - 1 :] = [found[2]]
            if not found[2].endswith("/"):
                listed.append("".join(folders))
    existing = [str(p.relative_to(SOURCE)) for p in SOURCE.rglob("*.py") if p.name != "__init__.py"]
    assert sorted(listed) == sorted(existing)


def documents() -> list[Path]:
    return [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks" / "README.md"]


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("name", ["docs/architecture.md"])
def test_files_and_tests_that_the_documents_name_exist(name: str) -> None:
    """Architecture notes rot first where they point at code."""
    text = (ROOT / name).read_text(encoding="utf-8")
    for path in re.findall(r"`((?:src|tests|tools|benchmarks|runtime|api|kernels)/[\w/.]+\.\w+)`", text):
        assert (ROOT / path).exists() or (SOURCE / path).exists(), path
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    for test in re.findall(r"`(test_\w+)`", text):
        assert f"def {test}(" in tests, test


# -- packaging -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def lock() -> dict[str, Any]:
    return tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))


def runtime_packages(lock: dict[str, Any]) -> set[str]:
    packages = {package["name"]: package for package in lock["package"]}
    found: set[str] = set()
    waiting = ["helios"]
    while waiting:
        package = packages[waiting.pop()]
        if package["name"] not in found:
            found.add(package["name"])
            waiting += [
                needed["name"]
                for needed in package.get("dependencies", [])
                if "win32" not in needed.get("marker", "") or "!=" in needed["marker"]
            ]
    return found - {"helios"}


def test_runtime_install_stays_small(lock: dict[str, Any]) -> None:
    """Every package is one more that can break, or be attacked; tools belong into the dev group."""
    packages = runtime_packages(lock)
    assert len(packages) <= MOST_RUNTIME_PACKAGES, sorted(packages)
    assert not packages & {"transformers", "pandas", "scipy", "pytest", "matplotlib", "openai", "aiohttp"}


def test_declared_dependencies_are_used(project: dict[str, Any]) -> None:
    """A dependency that nothing imports is dead weight."""
    imported: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.partition(".")[0])
    for requirement in project["project"]["dependencies"]:
        name = re.match(r"[\w-]+", requirement)[0].replace("_", "-").lower()  # type: ignore[index]
        assert IMPORTED_AS.get(name, name) in imported, requirement


def test_lock_file_is_portable(lock: dict[str, Any]) -> None:
    """A mirror's address in uv.lock works on one machine only."""
    text = (ROOT / "uv.lock").read_text(encoding="utf-8") + (ROOT / "pyproject.toml").read_text("utf-8")
    hosts = set(re.findall(r"[a-z]+://([^/\"\s]+)", text))
    assert hosts <= {"pypi.org", "files.pythonhosted.org"}
    torch = next(package for package in lock["package"] if package["name"] == "torch")
    assert torch["version"] == "2.13.0"


def test_ci_runs_the_one_script() -> None:
    """CI that does something else than .ci/run is CI that cannot be run at home."""
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    steps = workflow["jobs"]["check"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == [".ci/run"]
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for step in steps if "uses" in step)


def test_pre_commit_runs_what_ci_runs() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0][
        "hooks"
    ]
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for hook in hooks:
        assert hook["entry"].replace(" --fix", "") in script
