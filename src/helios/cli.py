"""The ``helios`` command. Without a subcommand it serves."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence as Seq

from helios import __version__
from helios.config import Settings, add_flags, environment_name, load
from helios.errors import StartupError

COMMANDS = ("serve", "info")


def main(argv: Seq[str] | None = None) -> None:
    """Run the command line; exits with status 0, 1 (cannot start) or 2 (wrong usage)."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or (words[0] not in COMMANDS and words[0] not in ("-h", "--help", "--version")):
        words.insert(0, "serve")
    arguments = vars(_parser().parse_args(words))
    command = arguments.pop("command")
    try:
        settings = load(arguments)
        sys.exit(_serve(settings) if command == "serve" else _info(settings))
    except StartupError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="helios", description="Serve Qwen3 models over an OpenAI-compatible API."
    )
    parser.add_argument("--version", action="version", version=f"helios {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve a model (the default command)")
    info = commands.add_parser("info", help="print the settings in force and the device, and exit")
    for command in (serve, info):
        add_flags(command)
    return parser


def _serve(settings: Settings) -> int:
    from helios.main import serve

    return serve(settings)


def _info(settings: Settings) -> int:
    from helios.config import resolve
    from helios.runtime.build import detect_device

    device = detect_device(settings)
    limits = resolve(settings, device)
    print(f"helios {__version__} on {device.name}, {device.total_memory / 2**30:.1f} GiB")
    chosen = {
        "max_batch_size": limits.max_batch_size,
        "prefill_chunk_size": limits.prefill_chunk_size,
        "max_queue_size": limits.max_queue_size,
        "batch_wait_ms": limits.batch_wait_ms,
    }
    for name in Settings.model_fields:
        value = getattr(settings, name)
        note = ""
        if value is None and name in chosen:
            value, note = chosen[name], "  (chosen from the device)"
        print(f"{environment_name(name)}={'' if value is None else value}{note}")
    return 0
