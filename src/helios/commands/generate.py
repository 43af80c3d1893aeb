"""``helios generate``: prompts in, text out."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from helios.commands.common import add_sampling, open_llm, params_for, sampling_fields
from helios.errors import StartupError
from helios.outputs import RequestOutput
from helios.runtime.request import SamplingParams

if TYPE_CHECKING:
    from helios.llm import LLM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="may be repeated; without, standard input is one prompt",
    )
    parser.add_argument(
        "--chat", action="store_true", help="prompts are messages of a user, answers the model's"
    )
    parser.add_argument("--n", type=int, metavar="N", help="answers to each prompt")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each answer")
    add_sampling(parser)


def run(flags: dict[str, Any], options: dict[str, Any]) -> int:
    """Print the answers: one prompt's as it comes, several when all are there."""
    prompts: list[str] = options["prompt"] or [_standard_input()]
    fields = sampling_fields(options)
    if options["n"] is not None:
        fields["n"] = options["n"]
    SamplingParams(**fields)  # wrong values show before the model loads
    with open_llm(flags) as llm:
        params = params_for(llm, fields)
        if len(prompts) == 1 and not options["json"] and fields.get("n", 1) == 1:
            return _stream(llm, prompts[0], params, options["chat"])
        if options["chat"]:
            results = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params)
        else:
            results = llm.generate(list(prompts), params)
        for result in results:
            _print(result, as_json=options["json"])
        return 1 if any(result.error for result in results) else 0


def _standard_input() -> str:
    if sys.stdin.isatty():
        raise StartupError("there is no prompt: use --prompt TEXT, or pipe one in")
    text = sys.stdin.read().removesuffix("\n")
    if not text:
        raise StartupError("the prompt on standard input is empty")
    return text


def _stream(llm: LLM, prompt: str, params: SamplingParams | None, chat: bool) -> int:
    deltas = llm.stream([{"role": "user", "content": prompt}] if chat else prompt, params)
    for delta in deltas:
        if delta.text:
            sys.stdout.write(delta.text)
            sys.stdout.flush()
    sys.stdout.write("\n")
    return 0


def _print(result: RequestOutput, *, as_json: bool) -> None:
    if result.error is not None:
        print(f"error: {result.error}", file=sys.stderr)
    for output in result.outputs:
        if not as_json:
            print(output.text)
            continue
        record: dict[str, Any] = {
            "prompt": result.prompt,
            "index": output.index,
            "text": output.text,
            "finish_reason": output.finish_reason,
            "prompt_tokens": len(result.prompt_token_ids),
            "completion_tokens": len(output.token_ids),
        }
        if output.reasoning is not None:
            record["reasoning"] = output.reasoning
        print(json.dumps(record, ensure_ascii=False))
