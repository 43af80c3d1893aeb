#!/usr/bin/env python3
"""Greedy tokens of Helios against transformers on the same weights, float32 on the CPU.

    uv run python tools/compare_with_transformers.py MODEL_FOLDER [--tokens 24] [--out RESULT.json]

Twenty prompts (short, several pages long, multi-turn, non-Latin) are answered by transformers alone, then
by the Helios engine: one at a time and all at once, with chunk sizes 16, 256 and 4096, with a cold and a
warm prefix cache. Every token must be equal. With a 0.5B model and two cores this takes about 20 minutes.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path

import tokenizers
import torch
import transformers

from helios.runtime.detokenizer import Vocabulary
from helios.runtime.engine import Engine, EngineConfig
from helios.runtime.qwen3.config import ModelConfig
from helios.runtime.qwen3.kv_cache import KVCache
from helios.runtime.qwen3.model import Qwen3
from helios.runtime.qwen3.weights import build_empty, load_weights
from helios.runtime.request import Job, SamplingParams
from helios.runtime.runner import ModelRunner
from helios.runtime.snapshot import end_token_ids, load_tokenizer

CHUNKS = (16, 256, 4096)
PAGES = 192

CONVERSATIONS: list[list[str]] = [  # user, assistant, user, ...; the last turn is the user's
    ["What is the capital of France?"],
    ["Hi"],
    ["Write a Python function that reverses a string."],
    ["List three prime numbers above 100."],
    ["Explain in one sentence why the sky is blue."],
    ["Translate 'good morning' into German, French and Spanish."],
    ["What does this print?\n\nfor i in range(3):\n    print(i * i)"],
    ["Give me a JSON object with the keys name and age for Ada, 36."],
    ["My name is Ada.", "Nice to meet you, Ada!", "What is my name?"],
    ["Count to five.", "1 2 3 4 5", "Now backwards.", "5 4 3 2 1", "And only the even ones?"],
    ["I have 3 apples and buy 4.", "You have 7 apples.", "I eat two. How many are left?"],
    ["中国的首都是哪里？"],
    ["Какая самая длинная река в мире?"],
    ["日本の首都はどこですか。"],
    ["ما هي عاصمة مصر؟"],
    ["Repeat exactly: naïve café ☕ 👩‍🚀 ½"],
    ["Here is a note. " + "The meeting is on Tuesday at nine. " * 60 + "When is the meeting?"],
    ["Remember the code word pomegranate. " + "Nothing to see here. " * 140 + "What is the code word?"],
    [
        " ".join(f"Line {n}: the value of item {n} is {n * 7}." for n in range(70))
        + " What is the value of item 42?"
    ],
    ["def f(x):\n    return x + 1\n\n" * 90 + "Describe this code in one sentence."],
]


def render(turns: list[str]) -> str:
    """ChatML, as the Qwen templates write it."""
    parts = ["<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"]
    for index, text in enumerate(turns):
        parts.append(f"<|im_start|>{('user', 'assistant')[index % 2]}\n{text}<|im_end|>\n")
    return "".join([*parts, "<|im_start|>assistant\n"])


def reference_answers(
    folder: Path, prompts: list[list[int]], tokens: int, ends: frozenset[int]
) -> list[list[int]]:
    """transformers' own greedy generation, one prompt at a time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers: list[list[int]] = []
    for ids in prompts:
        output = model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), max_new_tokens=tokens,
            do_sample=False, repetition_penalty=1.0, eos_token_id=sorted(ends), pad_token_id=min(ends),
            temperature=None, top_p=None, top_k=None,
        )  # fmt: skip
        answers.append(output[0, len(ids) :].tolist())
    return answers


def make_engine(model: Qwen3, vocabulary: Vocabulary, chunk: int, batch: int, ends: frozenset[int]) -> Engine:
    cache = KVCache(model.config, PAGES, torch.device("cpu"), torch.float32)
    runner = ModelRunner(
        model, cache, max_tokens=chunk, max_rows=batch, max_model_len=8192, vocabulary_size=vocabulary.size
    )
    config = EngineConfig(
        max_batch_size=batch,
        prefill_chunk_size=chunk,
        num_pages=PAGES,
        max_model_len=8192,
        eos_token_ids=ends,
    )
    return Engine(config, runner, vocabulary)


def answer(engine: Engine, prompts: list[list[int]], tokens: int, together: bool) -> list[list[int]]:
    jobs = [
        Job(f"p{n}", ids, SamplingParams(temperature=0, max_tokens=tokens), max_tokens=tokens)
        for n, ids in enumerate(prompts)
    ]
    for group in [jobs] if together else [[job] for job in jobs]:
        engine.waiting.extend(group)
        while engine.has_work:
            engine.step()
    engine.check_integrity()
    return [job.sequences[0].token_ids[job.num_prompt_tokens :] for job in jobs]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    ends = end_token_ids(args.folder)
    tokenizer = load_tokenizer(args.folder)
    vocabulary = Vocabulary(tokenizer)
    prompts = [tokenizer.encode(render(turns), add_special_tokens=False).ids for turns in CONVERSATIONS]
    expected = reference_answers(args.folder, prompts, args.tokens, ends)
    model = build_empty(ModelConfig.from_folder(args.folder), 8192, torch.device("cpu"), torch.float32)
    load_weights(model, args.folder)

    rows: list[dict[str, object]] = []
    for chunk in CHUNKS:
        for together in (False, True):
            engine = make_engine(model, vocabulary, chunk, len(prompts), ends)
            for cache in ("cold", "warm"):
                started = time.perf_counter()
                hits = engine.prefix_cache.hit_tokens
                got = answer(engine, prompts, args.tokens, together)
                wrong = [n for n, (one, other) in enumerate(zip(got, expected, strict=True)) if one != other]
                rows.append(
                    {
                        "chunk": chunk,
                        "prompts": "all at once" if together else "alone",
                        "prefix_cache": cache,
                        "equal": len(prompts) - len(wrong),
                        "different_prompts": wrong,
                        "restored_tokens": engine.prefix_cache.hit_tokens - hits,
                        "seconds": round(time.perf_counter() - started, 1),
                    }
                )
                print(rows[-1], flush=True)
    result = {
        "model": args.folder.name,
        "prompt_tokens": [len(ids) for ids in prompts],
        "answer_tokens": [len(ids) for ids in expected],
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
            "python": platform.python_version(),
        },
        "dtype": "float32",
        "table": rows,
        "samples": [vocabulary.decode(ids) for ids in expected[:8]],
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    sys.exit(0 if all(row["equal"] == len(prompts) for row in rows) else "tokens differ")


if __name__ == "__main__":
    main()
