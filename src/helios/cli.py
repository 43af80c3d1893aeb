"""The ``helios`` command. Without a subcommand it serves."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from importlib import import_module
from typing import Any

from helios import __version__
from helios.config import Settings, add_flags, load
from helios.errors import RequestError, StartupError

COMMANDS = {
    "serve": "serve a model (the default command)",
    "chat": "talk to a model in the terminal, in this process or on a server",
    "generate": "continue a prompt, or answer it with --chat",
    "bench": "measure a model's offline throughput in this process",
    "info": "print the settings in force, the device, the model's shape and the memory plan, and exit",
}
INTERRUPTED = 130  # as shells report a command that Ctrl-C has ended


def main(argv: Seq[str] | None = None) -> None:
    """Run the command line; exits with status 0, 1 (failed), 2 (wrong usage) or 130 (Ctrl-C)."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or (words[0] not in COMMANDS and words[0] not in ("-h", "--help", "--version")):
        words.insert(0, "serve")
    arguments = vars(_parser(words[0]).parse_args(words))
    command = arguments.pop("command")
    flags = {name: arguments.pop(name) for name in Settings.model_fields}
    try:
        sys.exit(
            _run(command, {name: value for name, value in flags.items() if value is not None}, arguments)
        )
    except (StartupError, RequestError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has gone; nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _parser(chosen: str) -> argparse.ArgumentParser:
    # A command's own flags come from its module, which the other commands need not load.
    parser = argparse.ArgumentParser(
        prog="helios", description="Serve Qwen3 models over an OpenAI-compatible API."
    )
    parser.add_argument("--version", action="version", version=f"helios {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, purpose in COMMANDS.items():
        command = commands.add_parser(name, help=purpose, description=purpose[0].upper() + purpose[1:] + ".")
        if name == chosen and name in ("chat", "generate", "bench"):
            import_module(f"helios.commands.{name}").add_arguments(command)
        add_flags(command)
    return parser


def _run(command: str, flags: dict[str, Any], options: dict[str, Any]) -> int:
    if command == "serve":
        from helios.main import serve

        return serve(load(flags))
    run: Callable[[dict[str, Any], dict[str, Any]], int] = import_module(f"helios.commands.{command}").run
    return run(flags, options)
