"""API keys: who may call, and how many requests each caller may have in flight."""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Callable

from starlette.datastructures import Headers

from helios.config import Settings
from helios.errors import AuthenticationError, RateLimitError, StartupError

OPEN_PATHS = frozenset({"/health", "/live", "/ready"})


class KeyRing:
    """The accepted keys, as digests, so that every comparison takes the same time."""

    def __init__(self, settings: Settings) -> None:
        keys = [key.get_secret_value() for key in settings.api_keys]
        if settings.api_key_file is not None:
            try:
                lines = settings.api_key_file.read_text("utf-8").splitlines()
            except OSError as error:
                reason = error.strerror
                raise StartupError(f"HELIOS_API_KEY_FILE={settings.api_key_file}: {reason}") from error
            keys += [line.strip() for line in lines if line.strip() and not line.startswith("#")]
            if not keys:
                raise StartupError(f"HELIOS_API_KEY_FILE={settings.api_key_file}: holds no key")
        self._digests = [_digest(key) for key in keys]

    def identify(self, headers: Headers) -> str:
        """A label for the caller's key (empty where none is needed). Raises AuthenticationError."""
        if not self._digests:
            return ""
        given = _given_key(headers)
        if not given:
            raise AuthenticationError(
                "You didn't provide an API key. Send it as 'Authorization: Bearer YOUR_KEY'.",
                code="missing_api_key",
            )
        digest = _digest(given)
        # Every key is compared, so the time tells nothing about which one nearly matched.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            raise AuthenticationError("Incorrect API key provided.")
        return str(matches.index(True))


def _given_key(headers: Headers) -> str:
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return value.strip()
    return headers.get("x-api-key", "").strip()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class ConcurrencyLimit:
    """At most ``limit`` requests in flight for each key; without keys, for all callers together."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._running: Counter[str] = Counter()

    def acquire(self, key: str) -> Callable[[], None]:
        """Count one request; gives the function that uncounts it, once. Raises RateLimitError."""
        if self._limit is not None and self._running[key] >= self._limit:
            raise RateLimitError(
                f"Rate limit reached: at most {self._limit} requests may run at once for one API key."
            )
        self._running[key] += 1
        released = False

        def release() -> None:
            nonlocal released
            if released:
                return
            released = True
            self._running[key] -= 1
            if not self._running[key]:
                del self._running[key]

        return release
