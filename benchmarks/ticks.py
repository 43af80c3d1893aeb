"""A Helios server's own record of its ticks (``HELIOS_TICK_LOG``), fetched after a workload and made small."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.client import HttpClient, ProtocolError
from benchmarks.metrics import distribution

SHOWN_TICKS = 400  # of a run, in its result file
COLUMNS = ("started", "finished", "decode_tokens", "prefill_tokens", "running", "waiting")


async def fetch_ticks(base_url: str, api_key: str | None = None) -> list[list[float]]:
    """The rows of ``GET /internal/ticks``; empty where the server has no such page or keeps no log."""
    try:
        async with HttpClient(base_url, api_key) as client:
            status, body = await client.get("/internal/ticks")
    except (OSError, ProtocolError, ValueError):
        return []
    if status != 200 or not isinstance(body, dict) or tuple(body.get("columns", ())) != COLUMNS:
        return []
    return list(body["ticks"])


def trimmed(ticks: list[list[float]], start: float, end: float) -> dict[str, Any] | None:
    """Durations of the ticks between two clock readings of this host, and a stretch of them in full.

    The stretch lies around the tick that computed most prompt tokens beside decoding rows: there a policy
    shows. None where no tick lies in between.
    """
    inside = np.array([tick for tick in ticks if tick[0] >= start and tick[1] <= end], dtype=float)
    if not inside.size:
        return None
    decode, prefill = inside[:, 2], inside[:, 3]
    seconds = inside[:, 1] - inside[:, 0]
    centre = int(np.argmax(np.where(decode > 0, prefill, -1)))
    first = max(0, min(centre - SHOWN_TICKS // 4, len(inside) - SHOWN_TICKS))
    shown = inside[first : first + SHOWN_TICKS]
    return {
        "ticks": len(inside),
        "decode_only_seconds": distribution(seconds[prefill == 0].tolist()),
        "mixed_seconds": distribution(seconds[(prefill > 0) & (decode > 0)].tolist()),
        "prefill_only_seconds": distribution(seconds[(prefill > 0) & (decode == 0)].tolist()),
        "started_ms": np.round(1e3 * (shown[:, 0] - shown[0, 0]), 2).tolist(),
        "finished_ms": np.round(1e3 * (shown[:, 1] - shown[0, 0]), 2).tolist(),
        **{name: shown[:, index].astype(int).tolist() for index, name in enumerate(COLUMNS) if index > 1},
    }
