"""Score the demo model on held-out dialogues, on the weights or over HTTP.

    python tools/train_demo_model/evaluate.py --model src/helios/demo_model --json scores.json
    python tools/train_demo_model/evaluate.py --base-url http://127.0.0.1:8000 --json scores.json

On the weights an answer counts when every one of its tokens is the most likely one given those before it,
which is when greedy decoding gives exactly this answer. Over HTTP the text, or the tool calls, must be equal.
"""

import argparse
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data import MAX_LENGTH, TRAINED, Encoder, pack
from dialogues import SKILLS, Dialogue, Gen, draw
from modeling import Compute, ModelConfig, Packing, Qwen3
from safetensors.torch import load_file

Scores = dict[str, dict[str, float]]
# New wordings of the requests, one row for all skills that are asked for in many ways.
WORDED = (
    "count",
    "echo",
    "unicode",
    "reverse",
    "spell",
    "sort",
    "arithmetic",
    "alphabet",
    "recall",
    "memory",
    "json",
    "tools",
)


def held_out_set(per_skill: int, seed: str = "evaluation") -> dict[str, list[Dialogue]]:
    """Dialogues that training never sees; the row "wordings" asks in held-out words."""
    sets = {
        skill: [draw(Gen(f"{seed}-{skill}-{i}", evaluation=True), skill) for i in range(per_skill)]
        for skill in SKILLS
    }
    sets["wordings"] = [
        draw(Gen(f"{seed}-wordings-{i}", evaluation=True, new_wording=True), WORDED[i % len(WORDED)])
        for i in range(per_skill)
    ]
    return sets


@torch.no_grad()
def evaluate_model(model: Qwen3, sets: dict[str, list[Dialogue]], compute: Compute) -> Scores:
    """Share of exact answers and of right tokens per skill."""
    encoder = Encoder()
    model.eval()
    scores: Scores = {}
    for skill, dialogues in sets.items():
        arrays = [
            array for array in encoder.encode(dialogues, train_earlier=False) if len(array) <= MAX_LENGTH
        ]
        exact: list[bool] = []
        right: list[bool] = []
        for first in range(0, len(arrays), 64):
            some = arrays[first : first + 64]
            batch = pack(some, sum(map(len, some)), pad=0)
            ids = torch.from_numpy((batch.tokens & ~np.uint16(TRAINED)).astype(np.int64)).to(compute.device)
            at = np.flatnonzero(batch.tokens & TRAINED)
            targets = torch.from_numpy(at).to(compute.device)
            hidden = model(ids, Packing(batch.starts, compute))
            hits = (model.logits(hidden[targets - 1]).argmax(-1) == ids[targets]).cpu().numpy()
            owner = np.searchsorted(batch.starts, at, side="right") - 1
            exact += [bool(hits[owner == i].all()) for i in range(len(some))]
            right += hits.tolist()
        scores[skill] = {"exact": float(np.mean(exact)), "tokens": float(np.mean(right)), "count": len(exact)}
    model.train()
    return scores


def load_model(folder: Path, device: torch.device) -> Qwen3:
    """The exported model of a folder, its bf16 weights in float32."""
    fields = json.loads((folder / "config.json").read_text())
    model = Qwen3(ModelConfig(**{name: fields[name] for name in ModelConfig.__dataclass_fields__}))
    model.load_state_dict(
        {name: weight.float() for name, weight in load_file(folder / "model.safetensors").items()}
    )
    return model.to(device)


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


def ask_server(base_url: str, dialogue: Dialogue, model: str) -> bool:
    """Whether the server's greedy answer is the right one."""
    if dialogue.raw:
        body = {
            "model": model,
            "prompt": dialogue.messages[0]["content"],
            "temperature": 0,
            "max_tokens": 256,
        }
        return _post(f"{base_url}/v1/completions", body)["choices"][0]["text"] == dialogue.answer
    messages = [_wire(message, i) for i, message in enumerate(dialogue.messages)]
    body = {
        "model": model,
        "messages": messages,
        "temperature": 0,
        "max_tokens": 600,
        "chat_template_kwargs": {"enable_thinking": dialogue.thinking},
    }
    if dialogue.tools:
        body["tools"] = dialogue.tools
    choice = _post(f"{base_url}/v1/chat/completions", body)["choices"][0]
    calls = [call["function"] for call in choice["message"].get("tool_calls") or []]
    made = [{"name": call["name"], "arguments": json.loads(call["arguments"])} for call in calls]
    if dialogue.tool_calls:
        return made == dialogue.tool_calls
    text = (choice["message"].get("content") or "").split("</think>")[-1].lstrip("\n")
    return text == dialogue.answer and choice["finish_reason"] == "stop"


def _wire(message: dict[str, Any], index: int) -> dict[str, Any]:
    """A message as the API takes it: tool calls carry an id and their arguments as a string."""
    message = {key: value for key, value in message.items() if key != "by_letter"}
    if message["role"] == "tool":
        return {**message, "tool_call_id": f"call_{index - 1}_0"}
    if "tool_calls" not in message:
        return message
    calls = [
        {
            "id": f"call_{index}_{i}",
            "type": "function",
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for i, call in enumerate(message["tool_calls"])
    ]
    return {**message, "tool_calls": calls}


def evaluate_server(
    base_url: str, sets: dict[str, list[Dialogue]], model: str = "demo", concurrency: int = 8
) -> Scores:
    """Share of exact answers per skill, over the API; the same dialogues as on the weights."""
    encoder = Encoder()
    scores: Scores = {}
    with ThreadPoolExecutor(concurrency) as pool:
        for skill, dialogues in sets.items():
            lengths = [len(array) for array in encoder.encode(dialogues, train_earlier=False)]
            short = [d for d, length in zip(dialogues, lengths, strict=True) if length <= MAX_LENGTH]
            exact = list(pool.map(lambda d: ask_server(base_url, d, model), short))
            scores[skill] = {"exact": sum(exact) / len(exact), "count": len(exact)}
    return scores


def table(scores: Scores) -> str:
    """The scores as text, one skill a line."""
    lines = [f"{'skill':<12}{'exact':>8}{'tokens':>8}{'asked':>7}"]
    for skill, score in scores.items():
        tokens = f"{100 * score['tokens']:>7.1f}%" if "tokens" in score else f"{'':>8}"
        lines.append(f"{skill:<12}{100 * score['exact']:>7.1f}%{tokens}{score['count']:>7.0f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--model", type=Path, help="folder of an exported model")
    where.add_argument("--base-url", help="an OpenAI-compatible server")
    parser.add_argument("--per-skill", type=int, default=256)
    parser.add_argument("--json", type=Path, help="write the scores here")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model-name", default="demo", help="the model named in requests to the server")
    parser.add_argument("--concurrency", type=int, default=8, help="requests to the server at the same time")
    args = parser.parse_args()
    sets = held_out_set(args.per_skill)
    if args.base_url:
        scores = evaluate_server(args.base_url.rstrip("/"), sets, args.model_name, args.concurrency)
    else:
        device = torch.device(args.device)
        scores = evaluate_model(load_model(args.model, device), sets, Compute(device))
    print(table(scores))
    if args.json:
        args.json.write_text(json.dumps(scores, indent=1) + "\n")


if __name__ == "__main__":
    main()
