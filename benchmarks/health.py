"""Whether a server is ready, and what it serves."""

from benchmarks.client import HttpClient, ProtocolError


async def check_health(client: HttpClient) -> tuple[bool, str]:
    """Whether the server is ready, and its own word for it: GET /health, else (404) /v1/models."""
    try:
        status, body = await client.get("/health")
        if status in (404, 405):
            status, body = await client.get("/v1/models")
    except (OSError, TimeoutError, ProtocolError) as error:
        return False, f"no answer ({type(error).__name__})"
    stage = body.get("stage") or body.get("status") if isinstance(body, dict) else None
    return status == 200, str(stage or f"HTTP {status}")


async def health_of(base_url: str) -> tuple[bool, str]:
    """check_health over a connection of its own."""
    async with HttpClient(base_url) as client:
        return await check_health(client)


async def first_model(client: HttpClient) -> str:
    """The first model that the server names; ConnectionError where it names none."""
    status, body = await client.get("/v1/models")
    try:
        return str(body["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise ConnectionError(f"/v1/models names no model (HTTP {status})") from None
