"""The OpenAPI document, and a fuzzer that reads it."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from tokenizers import Tokenizer

from helios.runtime.chat import ChatTemplate
from helios.runtime.detokenizer import Vocabulary
from tests.api.conftest import ServerFactory

PATHS = {
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/v1/models", "/v1/models/{model_id}", "/tokenize", "/detokenize", "/version", "/metrics", "/health",
    "/live", "/ready", "/internal/cache", "/internal/cache/clear", "/internal/ticks",
}  # fmt: skip


@pytest.fixture(scope="module")
def app(demo_tokenizer: Tokenizer, demo_vocabulary: Vocabulary, demo_template: ChatTemplate) -> Any:
    factory = ServerFactory(demo_tokenizer, demo_vocabulary, demo_template)
    server = factory()
    server.say("ok")
    yield server.app
    factory.close()


def test_document_names_every_route(app: Any) -> None:
    """The document is what ``/docs`` shows."""
    document = app.openapi()
    assert set(document["paths"]) == PATHS
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    name = body["schema"]["$ref"].rsplit("/", 1)[1]
    assert "messages" in document["components"]["schemas"][name]["properties"]
    for path in document["paths"].values():
        for operation in path.values():
            assert "422" not in operation["responses"]


def test_generated_requests_never_break_the_server(app: Any) -> None:
    """No 5xx and no status that the document does not list, for every operation."""
    loaded = schemathesis.openapi.from_asgi("/openapi.json", app)
    operations = [result.ok() for result in loaded.get_all_operations()]
    assert len(operations) == len(PATHS) + 1  # /internal/cache has two
    for operation in operations:
        _fuzz(operation)


def _fuzz(operation: Any) -> None:
    declared = {int(status) for status in operation.definition.raw["responses"]}

    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(case=operation.as_strategy())
    def check(case: Any) -> None:
        response = case.call()
        assert response.status_code < 500, response.text
        assert response.status_code in declared, (response.status_code, response.text)

    check()
