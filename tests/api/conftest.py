"""A whole server around a fake scheduler."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from tokenizers import Tokenizer

import helios
from helios.api.app import create_app
from helios.api.state import ServerState
from helios.config import Settings
from helios.runtime.chat import ChatTemplate, load_chat_template
from helios.runtime.detokenizer import Vocabulary
from helios.runtime.frontend import Frontend
from helios.runtime.job_builder import ModelInfo
from helios.runtime.metrics import Metrics
from helios.runtime.prompt_encoder import control_tokens
from helios.runtime.request import Grammar
from tests.api.fakes import FakeScheduler, Script

DEMO = Path(helios.__file__).parent / "demo_model"
MODEL = "org/model"
CONTEXT = 2048


@pytest.fixture(scope="session")
def demo_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


@pytest.fixture(scope="session")
def demo_vocabulary(demo_tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(demo_tokenizer)


@pytest.fixture(scope="session")
def demo_template(demo_tokenizer: Tokenizer) -> ChatTemplate:
    template = load_chat_template(DEMO, control_tokens(demo_tokenizer))
    assert template is not None
    return template


@dataclass
class FakeGrammars:
    """Remembers what it was asked to compile."""

    seen: list[Grammar] = field(default_factory=list)

    def compile(self, grammar: Grammar, param: str) -> object:
        self.seen.append(grammar)
        return object()


@dataclass
class Server:
    """The parts of one test server."""

    app: FastAPI
    state: ServerState
    frontend: Frontend
    scheduler: FakeScheduler
    tokenizer: Tokenizer
    grammars: FakeGrammars

    def client(self, **kwargs: Any) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20, **kwargs)

    async def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        async with self.client() as client:
            return await client.post(path, json=body, **kwargs)

    async def chat(self, **fields: Any) -> httpx.Response:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], **fields}
        return await self.post("/v1/chat/completions", body)

    async def events(self, path: str, body: Any) -> list[Any]:
        """Decoded stream events; ``[DONE]`` stays text."""
        response = await self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        return parse_events(response.text)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def say(self, *texts: str, end: bool = True) -> None:
        """Script the model's output; with several texts choice i says texts[i]."""
        ends = [self.scheduler.eos] if end else []
        self.scheduler.script = lambda job, choice: self.ids(texts[choice % len(texts)]) + ends


def parse_events(text: str) -> list[Any]:
    payloads = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


class ServerFactory:
    """Makes servers and stops their schedulers."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary, template: ChatTemplate) -> None:
        self._parts = tokenizer, vocabulary, template
        self._made: list[Server] = []

    def __call__(
        self, *, script: Script | None = None, template: ChatTemplate | None = None, **settings: Any
    ) -> Server:
        tokenizer, vocabulary, demo_template = self._parts
        eos = tokenizer.token_to_id("<|im_end|>")
        scheduler = FakeScheduler(vocabulary, eos, script)
        model = ModelInfo(MODEL, CONTEXT, vocabulary.size, (eos,), aliases=("alias",), revision="abc123")
        config = Settings(_env_file=None, **settings)  # pyright: ignore[reportCallIssue]
        grammars = FakeGrammars()
        frontend = Frontend(
            config,
            tokenizer,
            template or demo_template,
            scheduler,
            model,
            Metrics(model.name, CONTEXT, config.metrics_alias),
            vocabulary=vocabulary,
            grammars=grammars,
        )
        state = ServerState(config, stage="ready", frontend=frontend)
        server = Server(create_app(state), state, frontend, scheduler, tokenizer, grammars)
        self._made.append(server)
        return server

    def close(self) -> None:
        for server in self._made:
            server.scheduler.stop()
            server.frontend.close()


@pytest.fixture
def make_server(
    demo_tokenizer: Tokenizer, demo_vocabulary: Vocabulary, demo_template: ChatTemplate
) -> Iterator[ServerFactory]:
    factory = ServerFactory(demo_tokenizer, demo_vocabulary, demo_template)
    yield factory
    factory.close()


@pytest.fixture
def server(make_server: ServerFactory) -> Server:
    return make_server()
