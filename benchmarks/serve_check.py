#!/usr/bin/env python3
"""Many requests at once against a running server: none may be lost, and all pages must come back.

    python benchmarks/serve_check.py --base-url http://127.0.0.1:8000 --requests 64 --out RESULT.json

Half of the requests stream, a quarter shares a long prefix, four are cancelled half-way. Afterwards the
prefix cache is cleared and the server must hold no page.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp


async def one(session: aiohttp.ClientSession, url: str, number: int, model: str) -> dict[str, Any]:
    """One request of random token ids. Returns what came back."""
    rng = random.Random(number)
    prompt = [rng.randrange(1000, 50_000) for _ in range(rng.randrange(20, 1500))]
    if number % 4 == 0:
        prompt = list(range(1000, 1700)) + prompt
    want = rng.randrange(16, 128)
    body = {
        "model": model, "prompt": prompt, "max_tokens": want, "ignore_eos": True, "temperature": 0.6,
        "top_p": 1, "stream": number % 2 == 0,
    }  # fmt: skip
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    started = time.perf_counter()
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            return {"number": number, "status": response.status, "error": (await response.text())[:300]}
        if not body["stream"]:
            usage = (await response.json())["usage"]
        else:
            usage, first = {}, 0.0
            async for line in response.content:
                if line.startswith(b"data: {") and not first:
                    first = time.perf_counter()
                    if number % 16 == 2:
                        return {"number": number, "status": 200, "cancelled": True}
                if b'"usage":{' in line:
                    usage = json.loads(line[6:])["usage"]
    complete = usage.get("completion_tokens") == want and usage.get("prompt_tokens") == len(prompt)
    return {
        "number": number, "status": 200, "complete": complete, "tokens": want, "prompt_tokens": len(prompt),
        "cached_tokens": usage.get("prompt_tokens_details", {}).get("cached_tokens"),
        "seconds": time.perf_counter() - started,
    }  # fmt: skip


async def check(url: str, requests: int) -> dict[str, Any]:
    """Run the requests and read the server's books afterwards."""
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        model = (await (await session.get(f"{url}/v1/models")).json())["data"][0]["id"]
        started = time.perf_counter()
        results = await asyncio.gather(*(one(session, url, number, model) for number in range(requests)))
        seconds = time.perf_counter() - started
        await asyncio.sleep(1.0)
        blocks = (await (await session.get(f"{url}/internal/cache")).json())["num_blocks"]
        await session.delete(f"{url}/internal/cache")
        health = await (await session.get(f"{url}/health")).json()
    scheduler = health["scheduler"]
    finished = [result for result in results if result.get("complete")]
    return {
        "requests": requests,
        "complete": len(finished),
        "cancelled": sum(result.get("cancelled", False) for result in results),
        "failed": [r for r in results if not r.get("complete") and not r.get("cancelled")],
        "seconds": round(seconds, 3),
        "output_tokens": sum(result["tokens"] for result in finished),
        "restored_tokens": sum(result["cached_tokens"] or 0 for result in finished),
        "cached_blocks_after": blocks,
        "pages_in_use_after": scheduler["pages_total"] - scheduler["pages_free"],
        "running_after": scheduler["running"],
        "health": {key: health[key] for key in ("model", "device", "dtype", "memory", "startup_seconds")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = asyncio.run(check(args.base_url, args.requests))
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    good = not result["failed"] and result["pages_in_use_after"] == 0 and result["running_after"] == 0
    sys.exit(0 if good else "requests were lost or pages were kept")


if __name__ == "__main__":
    main()
