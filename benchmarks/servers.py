"""Servers to measure: read from a TOML file, started, watched until healthy, and stopped for certain."""

import asyncio
import os
import shlex
import signal
import string
import subprocess
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.client import HttpClient, clock
from benchmarks.floor import Card, ModelShape
from benchmarks.health import check_health, health_of
from benchmarks.load import run_loop
from benchmarks.workloads import LARGEST_TOKEN_ID, parse


class ServerError(RuntimeError):
    """A server that did not start, did not become healthy in time, or ended."""


class ConfigError(ValueError):
    """A configuration file that breaks the schema of benchmarks/README.md."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """One server. `command` as written (it is published); `arguments` with the variables put in.

    Without a command the server is taken to run already.
    """

    name: str
    base_url: str
    command: str | None = None
    arguments: tuple[str, ...] = ()
    model: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    body: Mapping[str, Any] = field(default_factory=dict)
    ready_timeout_seconds: float = 300.0


@dataclass(frozen=True, slots=True)
class Config:
    """A comparison: its servers, what warms them, and what floors are computed from (None: no floors)."""

    servers: tuple[ServerSpec, ...]
    warm_up: tuple[str, ...] = ()
    largest_id: int = LARGEST_TOKEN_ID
    shape: ModelShape | None = None
    card: Card | None = None


def _take(table: Any, place: str, kinds: Mapping[str, type | tuple[type, ...]]) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise ConfigError(f"{place}: expected a table")
    for key, value in table.items():
        if key not in kinds:
            raise ConfigError(f"{place}: unknown key {key!r}; known: {', '.join(kinds)}")
        if not isinstance(value, kinds[key]):
            raise ConfigError(f"{place}.{key}: {value!r} has the wrong type")
    return table


_SERVER_KEYS: dict[str, type | tuple[type, ...]] = {
    "name": str, "base_url": str, "command": str, "model": str, "env": dict, "cwd": str, "body": dict,
    "ready_timeout_seconds": (int, float),
}  # fmt: skip


def load_config(path: Path, variables: Mapping[str, str] | None = None) -> Config:
    """Read a TOML file; ${NAME} comes from `variables`, then from the environment. Raises ConfigError."""
    known = {**os.environ, **(variables or {})}

    def expand(text: str, place: str) -> str:
        try:
            return string.Template(text).substitute(known)
        except (KeyError, ValueError) as error:
            raise ConfigError(f"{place}: no value for {error} (export it, or --set NAME=VALUE)") from None

    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path.name}: {error}") from None
    _take(data, path.name, {"servers": list, "model": dict, "card": dict, "warm_up": list})
    servers = []
    for index, table in enumerate(data.get("servers", [])):
        place = f"servers[{index}]"
        given = _take(table, place, _SERVER_KEYS)
        if "name" not in given or "base_url" not in given:
            raise ConfigError(f"{place}: name and base_url are required")
        command = given.get("command")
        # Split first, expand after: a value with a space stays one argument.
        arguments = [expand(part, f"{place}.command") for part in shlex.split(command or "")]
        env = {key: expand(str(value), f"{place}.env.{key}") for key, value in given.get("env", {}).items()}
        cwd = expand(given["cwd"], f"{place}.cwd") if "cwd" in given else None
        base_url = expand(given["base_url"], f"{place}.base_url")
        fixed = {"base_url": base_url, "arguments": tuple(arguments), "env": env, "cwd": cwd}
        servers.append(ServerSpec(**{**given, **fixed}))
    names = [server.name for server in servers]
    if not servers or len(set(names)) != len(names):
        raise ConfigError(f"{path.name}: needs [[servers]] with different names")
    model = _take(data.get("model", {}), "model", {"config": str, "largest_id": int})
    numbers = _take(data.get("card", {}), "card", {"bandwidth_tb_s": (int, float), "tflops": (int, float)})
    for spec in data.get("warm_up", []):
        parse(spec)
    shape = card = None
    if "config" in model and len(numbers) == 2:
        shape = ModelShape.from_file(Path(expand(model["config"], "model.config")))
        card = Card(numbers["bandwidth_tb_s"] * 1e12, numbers["tflops"] * 1e12)
    largest_id = model.get("largest_id", LARGEST_TOKEN_ID)
    return Config(tuple(servers), tuple(data.get("warm_up", [])), largest_id, shape, card)


class RunningServer:
    """A server's process group: `with` starts it and, whatever happens, ends it.

    The server gets a session of its own, so that workers it has started die with it. With `attach` it was
    started by its command already, and goes on afterwards.
    """

    def __init__(self, spec: ServerSpec, log: Path, *, attach: bool = False) -> None:
        self.spec = spec
        self.attach = attach
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None
        self.started = 0.0

    def __enter__(self) -> "RunningServer":
        if self.attach or not self.spec.arguments:
            return self
        healthy, word = run_loop(health_of(self.spec.base_url))
        if healthy or not word.startswith("no answer"):
            raise ServerError(f"{self.spec.name}: something already answers at {self.spec.base_url} ({word})")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as output:
            self.started = clock()
            try:
                self.process = subprocess.Popen(
                    self.spec.arguments,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **self.spec.env},
                    cwd=self.spec.cwd,
                    start_new_session=True,
                )
            except OSError as error:
                raise ServerError(f"{self.spec.name}: cannot start: {error}") from None
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def check(self) -> None:
        """ServerError, with the end of the log, if the process has ended."""
        if self.process is not None and self.process.poll() is not None:
            tail = self.log.read_text(errors="replace").strip().splitlines()[-12:]
            raise ServerError(
                f"{self.spec.name} ended with code {self.process.returncode}; {self.log.name} ends with:\n  "
                + "\n  ".join(tail)
            )

    async def wait_ready(
        self, poll_seconds: float = 0.1, on_stage: Callable[[str, float], None] | None = None
    ) -> float:
        """Poll until healthy: seconds since the start. `on_stage` hears each new word of /health."""
        began = self.started or clock()
        seen = ""
        async with HttpClient(self.spec.base_url) as client:
            while True:
                self.check()
                healthy, word = await check_health(client)
                since = clock() - began
                if word != seen and on_stage is not None:
                    on_stage(word, since)
                seen = word
                if healthy:
                    return since
                if since > self.spec.ready_timeout_seconds:
                    raise ServerError(f"{self.spec.name} is not healthy after {since:.0f} s: {word}")
                await asyncio.sleep(poll_seconds)

    def stop(self, patience_seconds: float = 20.0) -> None:
        """SIGTERM to the whole group, SIGKILL to what is left."""
        if self.process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                break
            try:
                self.process.wait(patience_seconds)
            except subprocess.TimeoutExpired:
                continue
        self.process.wait()
        self.process = None


def variables_from(pairs: list[str]) -> dict[str, str]:
    """--set NAME=VALUE arguments as a dict; ConfigError for any other form."""
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set takes NAME=VALUE, not {pair!r}")
        found[name] = value
    return found


def exit_on_sigterm() -> None:
    """Let SIGTERM unwind the stack, so that servers are stopped when a time limit ends this process."""

    def leave(*_: object) -> None:
        raise SystemExit(143)

    signal.signal(signal.SIGTERM, leave)
