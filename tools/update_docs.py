"""Keep the parts of the documentation that the code already says: settings and files.

    uv run python tools/update_docs.py            # rewrite them
    uv run python tools/update_docs.py --check    # only say what is out of date; status 1 if anything is

Between its markers README.md gets the table of settings and the list of source files; .env.example is written
whole. What they say comes from helios.config.Settings and from the first line of each module's docstring.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from pathlib import Path
from typing import Any

from helios import config
from helios.config import Settings, environment_name

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "helios"
ENV_HEADER = """\
# Settings of Helios. Copy this file to .env and remove the # before what you want to change; the values here
# are the defaults, and a variable without a value is chosen at start, from the device or the model.
# Environment variables win over .env, command-line flags (--max-batch-size 16) over both.
"""


def groups() -> list[tuple[str, list[str]]]:
    """Headings of the Settings class, from its comments, with the fields below each."""
    found: list[tuple[str, list[str]]] = []
    body = Path(config.__file__).read_text(encoding="utf-8").partition("class Settings")[2]
    for line in body.splitlines():
        if heading := re.match(r"    # (\w.*)", line):
            found.append((heading[1].rstrip("."), []))
        elif (field := re.match(r"    (\w+): ", line)) and field[1] in Settings.model_fields:
            found[-1][1].append(field[1])
        elif line.startswith("@dataclass"):
            break
    return [(heading, fields) for heading, fields in found if fields]


def default_text(name: str) -> str:
    """The default as it is written in a .env file; empty where there is none."""
    value: Any = Settings.model_fields[name].default
    if value is None or value == ():
        return ""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, float) and value == int(value):
        return str(int(value))
    return str(value)


def settings_table() -> str:
    """A Markdown table of all settings, one section for each heading."""
    lines = ["| variable | default | meaning |", "|---|---|---|"]
    for heading, fields in groups():
        lines.append(f"| **{heading}** | | |")
        for name in fields:
            text = default_text(name)
            meaning = (Settings.model_fields[name].description or "").replace("|", "\\|")
            lines.append(f"| `{environment_name(name)}` | {f'`{text}`' if text else ''} | {meaning} |")
    return "\n".join(lines)


def env_example() -> str:
    """The text of .env.example."""
    lines = [ENV_HEADER]
    for heading, fields in groups():
        lines.append(f"# --- {heading} ---\n")
        for name in fields:
            lines.append(f"# {Settings.model_fields[name].description}")
            lines.append(f"#{environment_name(name)}={default_text(name)}\n")
    return "\n".join(lines)


def summary(path: Path) -> str:
    """The first line of a module's docstring, without its full stop."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    line = text.split("\n\n")[0].replace("\n", " ").rstrip(".").replace("``", "")
    return re.sub(r":\w+:`([^`]*)`", r"\1", line)


def file_list() -> str:
    """Every source file with its first line, folder by folder."""
    lines = ["```", "src/helios/"]

    def add(folder: Path, indent: str) -> None:
        files = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
        width = max((len(path.name) for path in files), default=0) + 2
        for path in files:
            lines.append(f"{indent}{path.name:<{width}}{summary(path)}")
        for inner in sorted(path for path in folder.iterdir() if (path / "__init__.py").exists()):
            lines.append(f"{indent}{inner.name + '/':<{width}}{summary(inner / '__init__.py')}")
            add(inner, indent + "  ")

    add(SOURCE, "  ")
    return "\n".join([*lines, "```"])


def replaced(text: str, name: str, content: str) -> str:
    """`text` with what stands between the markers of `name` replaced."""
    start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    head, opened, rest = text.partition(start)
    _, closed, tail = rest.partition(end)
    if not opened or not closed:
        raise ValueError(f"README.md has no markers for {name}")
    return head + start + content + "\n" + end + tail


def documents() -> dict[Path, str]:
    """What the files should hold."""
    readme = ROOT / "README.md"
    text = replaced(readme.read_text(encoding="utf-8"), "settings", settings_table())
    return {readme: replaced(text, "files", file_list()), ROOT / ".env.example": env_example()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    stale = [
        path
        for path, text in documents().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path in stale:
        print(f"{path.relative_to(ROOT)} is out of date" if options.check else path.relative_to(ROOT))
        if not options.check:
            path.write_text(documents()[path], encoding="utf-8")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
