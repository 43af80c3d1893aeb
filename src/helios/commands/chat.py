"""``helios chat``: a dialogue in the terminal, with a model in this process or on a server."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from helios.commands.common import add_sampling, open_llm, params_for, sampling_fields
from helios.errors import RequestError, UnavailableError
from helios.runtime.request import SamplingParams

if TYPE_CHECKING:
    from helios.llm import LLM

HELP = "/reset forgets the dialogue, /quit (or Ctrl-D) leaves, Ctrl-C stops an answer"
CONNECT_SECONDS = 600.0  # of silence; a long prompt takes its time
Message = dict[str, Any]
Piece = tuple[str, str]  # thinking, text


class Answers(Protocol):
    """Where answers come from."""

    def answer(self, messages: list[Message]) -> Iterator[Piece]:
        """The answer in pieces. Raises RequestError."""
        ...


class LocalAnswers:
    """A model in this process."""

    def __init__(self, llm: LLM, fields: dict[str, Any], thinking: bool | None) -> None:
        self._llm, self._thinking = llm, thinking
        self._params = params_for(llm, fields)

    def answer(self, messages: list[Message]) -> Iterator[Piece]:
        """The answer in pieces. Raises RequestError."""
        if self._thinking is None:
            deltas = self._llm.stream(messages, self._params)
        else:
            deltas = self._llm.stream(messages, self._params, enable_thinking=self._thinking)
        for delta in deltas:
            yield delta.reasoning, delta.text


class RemoteAnswers:
    """A server with OpenAI's chat completions."""

    def __init__(self, url: str, key: str | None, fields: dict[str, Any]) -> None:
        base = url.rstrip("/").removesuffix("/chat/completions").removesuffix("/v1")
        self._url = base + "/v1/chat/completions"
        self._key, self._fields = key, fields

    def answer(self, messages: list[Message]) -> Iterator[Piece]:
        """The answer in pieces. Raises RequestError."""
        body = json.dumps({"messages": messages, "stream": True, **self._fields}).encode()
        headers = {"content-type": "application/json"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        try:
            request = urllib.request.Request(self._url, body, headers)
            with urllib.request.urlopen(request, timeout=CONNECT_SECONDS) as response:
                for line in response:
                    if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                        yield from _pieces(json.loads(line[6:]))
        except urllib.error.HTTPError as error:
            raise RequestError(_message(error)) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise UnavailableError(f"no answer from {self._url}: {reason}") from None


def _pieces(chunk: dict[str, Any]) -> Iterator[Piece]:
    if "error" in chunk:
        raise RequestError(str(chunk["error"].get("message", "the server reports an error")))
    for choice in chunk.get("choices", []):
        delta = choice.get("delta", {})
        yield delta.get("reasoning_content") or "", delta.get("content") or ""


def _message(error: urllib.error.HTTPError) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return f"{json.loads(error.read())['error']['message']} (HTTP {error.code})"
    return f"HTTP {error.code} {error.reason}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument(
        "--url", help="talk to a server, such as http://127.0.0.1:8000, and load nothing here"
    )
    parser.add_argument("--api-key", metavar="KEY", help="for the server of --url")
    parser.add_argument("--system", metavar="TEXT", help="the system's message")
    parser.add_argument(
        "--thinking", action=argparse.BooleanOptionalAction, help="whether the model thinks before it answers"
    )
    add_sampling(parser)


def run(flags: dict[str, Any], options: dict[str, Any]) -> int:
    """Talk until the input ends. Status 1 if an answer failed and nobody was at the terminal to see."""
    fields = sampling_fields(options)
    SamplingParams(**fields)  # wrong values show before the model loads
    thinking: bool | None = options["thinking"]
    if options["url"] is not None:
        if thinking is not None:
            fields["chat_template_kwargs"] = {"enable_thinking": thinking}
        if "model_id" in flags:
            fields["model"] = flags["model_id"]
        return Conversation(
            RemoteAnswers(options["url"], options["api_key"], fields), options["system"]
        ).run()
    with open_llm(flags) as llm:
        return Conversation(LocalAnswers(llm, fields, thinking), options["system"]).run()


class Conversation:
    """The loop of question and answer on standard input and output."""

    def __init__(self, answers: Answers, system: str | None) -> None:
        self._answers = answers
        self._opening: list[Message] = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._opening)
        self._interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._failed = False

    def run(self) -> int:
        """Read and answer until /quit or the end of the input."""
        if self._interactive:
            with contextlib.suppress(ImportError):
                importlib.import_module("readline")  # gives input() its line editing
            print(HELP, file=sys.stderr)
        while True:
            try:
                line = input("> " if self._interactive else "").strip()
            except EOFError:
                break
            if line in ("/quit", "/exit"):
                break
            if line == "/reset":
                self._messages = list(self._opening)
            elif line.startswith("/") and " " not in line:
                print(HELP, file=sys.stderr)
            elif line:
                self._turn(line)
        if self._interactive:
            print()
        return 1 if self._failed and not self._interactive else 0

    def _turn(self, line: str) -> None:
        self._messages.append({"role": "user", "content": line})
        said: list[str] = []
        try:
            self._show(said)
        except RequestError as error:
            self._failed = True
            self._messages.pop()
            print(f"{chr(10) if said else ''}error: {error}", file=sys.stderr)
            return
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            print(" [stopped]", file=sys.stderr)
        self._messages.append({"role": "assistant", "content": "".join(said)})

    def _show(self, said: list[str]) -> None:
        """Write the answer as it comes; thinking only to a terminal, dimmed."""
        dim = False
        try:
            for thought, text in self._answers.answer(self._messages):
                if thought and self._interactive:
                    begin, dim = "" if dim else "\033[2m", True
                    self._write(begin + thought)
                if text:
                    self._write("\033[0m\n\n" if dim else "")
                    dim = False
                    said.append(text)
                    self._write(text)
        finally:
            if dim:
                self._write("\033[0m")
        self._write("\n")

    @staticmethod
    def _write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
