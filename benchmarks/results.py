"""What surrounds a measurement (card, driver, versions, commit) and the JSON files it is kept in."""

import json
import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results"
SCHEMA_VERSION = 1
_PACKAGES = ("helios", "torch", "triton", "vllm", "sglang", "transformers", "numpy", "uvloop")


def _output(*command: str) -> str | None:
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True, cwd=ROOT)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match.group(1) if match else platform.machine()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment() -> dict[str, Any]:
    """Cards, driver, processor, versions and commit; no host, user or path names."""
    query = "--query-gpu=name,driver_version,memory.total,power.limit,clocks.max.sm"
    cards = [
        dict(zip(("name", "driver", "memory", "power_limit", "max_sm_clock"), line.split(", "), strict=False))
        for line in (_output("nvidia-smi", query, "--format=csv,noheader") or "").splitlines()
    ]
    told = os.environ.get("BENCHMARK_COMMIT")
    return {
        "cards": cards,
        "processor": _processor(),
        "cores": _cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": _versions(),
        # A copy of the files gets told which commit they are, whatever repository lies around it.
        "commit": told or _output("git", "rev-parse", "--short=12", "HEAD"),
        "uncommitted_changes": not told
        and bool(_output("git", "status", "--porcelain", "--untracked-files=no")),
    }


def command_line() -> list[str]:
    """This process's command with absolute paths cut to their last part."""
    script, *rest = sys.argv
    return [f"benchmarks/{Path(script).name}", *(re.sub(r"(^|=)/\S*/", r"\1", argument) for argument in rest)]


def envelope(kind: str, label: str, **content: Any) -> dict[str, Any]:
    """A result with everything needed to read it later. `kind`: run, compare, offline, step and so on."""
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": kind,
        "label": label,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line(),
        "environment": environment(),
        **content,
    }


def _rounded(value: Any) -> Any:
    """Six significant digits: more is noise, and the files are committed."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def _dump(value: Any, depth: int = 0) -> str:
    """JSON with one line per leaf object, so that a result can be read and a diff stays short."""
    flat = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or not value or len(flat) <= 140 or depth >= 6:
        return flat
    if isinstance(value, list) and not isinstance(value[0], dict | list):
        return flat
    pad = " " * (depth + 1)
    if isinstance(value, dict):
        parts = [f"{pad}{json.dumps(key)}: {_dump(item, depth + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(parts) + "\n" + pad[1:] + "}"
    if isinstance(value[0], dict) and "sent_at_seconds" in value[0]:
        return (
            "[\n"
            + ",\n".join(pad + json.dumps(item, ensure_ascii=False) for item in value)
            + "\n"
            + pad[1:]
            + "]"
        )
    return "[\n" + ",\n".join(pad + _dump(item, depth + 1) for item in value) + "\n" + pad[1:] + "]"


def result_path(kind: str, label: str, folder: Path = RESULTS) -> Path:
    """A fresh file name from kind, label and time."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", label).strip("-") or "unlabelled"
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    path, number = folder / f"{kind}-{safe}-{stamp}.json", 2
    while path.exists():
        path, number = folder / f"{kind}-{safe}-{stamp}-{number}.json", number + 1
    return path


def write(path: Path, result: dict[str, Any]) -> None:
    """Write a result whole or not at all: a run that is cut off leaves the last complete file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(_dump(_rounded(result)) + "\n", encoding="utf-8")
    partial.replace(path)


def load_all(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The results of a folder, oldest first. Files that are not results are left out."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            continue
        if isinstance(data, dict) and data.get("schema_version") == SCHEMA_VERSION and "kind" in data:
            found.append(data | {"file": path.name})
    return sorted(found, key=lambda data: data["created"])
