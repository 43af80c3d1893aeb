"""The report's sections about the engine in this process: steps, idle shares, studies, kernels, other clients."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.device_trace import CLASSES

Section = Callable[[dict[str, Any], Path | None], list[str]]


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table and the empty line behind it."""
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def image(path: Path, figures: Path) -> list[str]:
    """A figure's reference, from the report's folder."""
    return [f"![{path.stem}]({figures.parent.name}/{figures.name}/{path.name})", ""]


def _ms(row: dict[str, Any], metric: str, *keys: str) -> str:
    found = row.get(metric)
    return " / ".join(f"{1e3 * found[key]:.3g}" for key in keys) if found else "-"


def step_section(result: dict[str, Any], figures: Path | None) -> list[str]:
    """The breakdown of a step and its distance from the card's limits."""
    lines: list[str] = []
    if result["profiles"]:
        lines += ["One decode step, microseconds. Classes and gaps are of the recorded step; idle is 1 - kernel "
                  "time / the step's time without recording.", ""]  # fmt: skip
        kinds = [kind for kind in CLASSES if any(one["microseconds"][kind] for one in result["profiles"])]
        head = ["rows x context", "step", "recorded", "kernels", "idle", *kinds]
        rows = [
            [
                f"{one['rows']} x {one['context']}",
                f"{one['step_microseconds']:.0f}",
                f"{one['traced_step_microseconds']:.0f}",
                f"{one['kernels_per_step']:.0f}",
                f"{one['idle_share']:.1%}",
                *(f"{one['microseconds'][kind]:.0f}" for kind in kinds),
            ]
            for one in result["profiles"]
        ]
        lines += markdown_table(head, rows)
    if result["ladder"] and result["card"]:
        card = result["card"]
        lines += [f"Against the card's limits, measured: {card['bandwidth'] / 1e12:.2f} TB/s, "
                  f"{card['flops'] / 1e12:.0f} TFLOP/s.", ""]  # fmt: skip
        head = [
            "rows",
            "step, ms",
            "floor, ms",
            "floor / step",
            "TB/s",
            "of bandwidth",
            "TFLOP/s",
            "tokens/s",
        ]
        rows = [
            [
                str(one["rows"]),
                f"{one['step_microseconds'] / 1e3:.3f}",
                f"{one['floor_microseconds'] / 1e3:.3f}",
                f"{one['of_limit']:.0%}",
                f"{one['bytes_per_second'] / 1e12:.2f}",
                f"{one['bytes_per_second'] / card['bandwidth']:.0%}",
                f"{one['flops_per_second'] / 1e12:.1f}",
                f"{one['tokens_per_second']:,.0f}",
            ]
            for one in result["ladder"]
        ]
        lines += markdown_table(head, rows)
    if figures is not None:
        from benchmarks.engine_figures import draw_step

        for path in draw_step(result, figures):
            lines += image(path, figures)
    return lines


def idle_section(result: dict[str, Any], figures: Path | None) -> list[str]:
    """Idle shares over whole runs, host time by phase, the functions that take it."""
    lines = [
        "Share of the time at work in which no kernel ran, and the host's time by phase (wait: for the device).",
        "",
    ]
    head = ["workload", "idle", "tokens/s", "recorded", "ticks", *(f"{n}, µs a tick" for n in _PHASES)]
    rows = [
        [
            one["workload"],
            f"{one['idle']:.1%}",
            f"{one['plain'].get('output_tokens_per_second', 0):,.0f}",
            f"{one['recorded'].get('output_tokens_per_second', 0):,.0f}",
            str(one["ticks"]),
            *(f"{one['host_microseconds_per_tick'].get(name, 0):.0f}" for name in _PHASES),
        ]
        for one in result["workloads"]
    ]
    lines += markdown_table(head, rows)
    for one in result["workloads"]:
        if one["workload"] != "offline256":
            continue
        lines += ["Python functions with most time of their own, offline256 under cProfile:", ""]
        lines += markdown_table(
            ["function", "where", "calls", "own, s", "total, s"],
            [
                [f"`{row['function']}`", row["where"], str(row["calls"]), f"{row['own_seconds']:.3f}",
                 f"{row['total_seconds']:.3f}"]
                for row in one["python"][:8]
            ],
        )  # fmt: skip
    if figures is not None:
        from benchmarks.engine_figures import draw_idle

        for path in draw_idle(result, figures):
            lines += image(path, figures)
    return lines


_PHASES = ("admit", "plan", "launch", "wait", "commit")
_STUDIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "budgets": ("Token budgets of a tick under Poisson arrivals", ("rate", "budget")),
    "offline": ("Token budgets and throughput, all requests there at once", ("budget",)),
    "attention": (
        "Decode rows beside a prompt: attention in two calls, in one, and with the own decode kernel (one layer)",
        ("decode_rows", "context", "prompt", "two_calls_microseconds", "one_call_microseconds",
         "own_kernel_microseconds"),
    ),
    "admission": ("Pages for the longest answer, or as tokens come, in small pools", ("pages", "admission")),
    "offload": ("Growing chats in a pool that holds a third of them: evicted blocks dropped, or kept in host memory",
                ("host_memory", "pages")),
}  # fmt: skip


def studies_section(result: dict[str, Any], figures: Path | None) -> list[str]:
    """Every study with its table and figure."""
    drawn: dict[str, Path] = {}
    if figures is not None:
        from benchmarks.engine_figures import draw_studies

        drawn = draw_studies(result, figures)
    lines: list[str] = []
    for study, rows in result["studies"].items():
        title, keys = _STUDIES[study]
        lines += [f"**{title}.**", ""]
        if study == "attention":
            cells = [
                [
                    f"{row[key]:.0f}" if isinstance(row.get(key), float) else str(row.get(key, "-"))
                    for key in keys
                ]
                for row in rows
            ]
            lines += markdown_table([key.replace("_", " ") for key in keys], cells)
            continue
        head = [
            *keys,
            "tokens/s",
            "TTFT p50 / p99, ms",
            "ITL p50 / p99 / max, ms",
            "cached",
            "put back",
            "failed",
        ]
        cells = [
            [
                *(str(row[key]) for key in keys),
                f"{row.get('output_tokens_per_second', 0):,.0f}",
                _ms(row, "time_to_first_token_seconds", "p50", "p99"),
                _ms(row, "inter_token_seconds", "p50", "p99", "max"),
                f"{row.get('cached_fraction', 0):.0%}",
                str(row.get("preemptions", 0)),
                str(row["failed"]),
            ]
            for row in rows
        ]
        lines += markdown_table([name.replace("_", " ") for name in head], cells)
        if study in drawn and figures is not None:
            lines += image(drawn[study], figures)
    return lines


def special_section(result: dict[str, Any], figures: Path | None) -> list[str]:
    """The price of one unusual row."""
    lines = [f"{result['rows']} decoding rows of {result['context']} tokens, one of them special; "
             f"target: a step at most {result['target'] - 1:.0%} longer.", ""]  # fmt: skip
    rows = [
        [name, f"{1e3 * one['step_seconds']:.3f}", f"{one['over_plain']:.1%}",
         "" if name == "plain" else "met" if one["over_plain"] <= result["target"] else "missed"]
        for name, one in result["kinds"].items()
    ]  # fmt: skip
    return lines + markdown_table(["the one row", "step, ms", "of the plain step", "target"], rows)


def agreement_section(result: dict[str, Any], figures: Path | None) -> list[str]:
    """This client's figures beside other clients', same server."""
    asked = result["workload"]
    lines = [f"{asked['count']} requests of about {asked['input']} tokens in and {asked['output']} out, "
             f"{asked['concurrency']} in flight, medians of rounds, difference from ours. Agreement means "
             f"within {result['allowed']:.0%}.", ""]  # fmt: skip
    names: list[str] = list(result["clients"])
    shown: dict[str, str] = {"vllm": "vllm bench serve", "plain": "plain httpx client", "ours": "run.py"}
    metrics = [metric for metric in result["clients"]["ours"] if metric != "difference"]
    rows: list[list[str]] = []
    for metric in metrics:
        cells = [
            f"{one[metric]:.4g}" + (f" ({one['difference'][metric]:+.1%})" if name != "ours" else "")
            for name, one in result["clients"].items()
        ]
        rows.append([metric.replace("_", " "), *cells])
    return lines + markdown_table(["metric", *(shown.get(name, name) for name in names)], rows)


def kernels_section(result: dict[str, Any], figures: Path | None) -> list[str]:
    """Own kernels beside torch's forms and the bandwidth floor."""
    lines = ["Microseconds of one call in a CUDA graph of many.", ""]
    keys = ("us", "pdl_us", "floor_us", "torch_us")
    rows = [
        [row["kernel"], str(row["rows"]), *("-" if row[key] is None else f"{row[key]:.1f}" for key in keys)]
        for row in result["rows"]
    ]
    head = ["kernel", "rows", "time", "with dependent launch", "floor", "plain torch"]
    return lines + markdown_table(head, rows)


_MEASURED = ("label", "us", "tb_s", "tflop_s", "error", "error_vs_torch")
_USUAL = ("fa2", "flash", "varlen", "torch")  # beginnings of the names of torch's own forms


def attention_files(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """The files that attention.py has written, by their names."""
    found: list[tuple[str, dict[str, Any]]] = []
    for path in sorted(folder.glob("attention*.json")):
        data: Any = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(data, dict) and {"gpu", "results"} <= data.keys():
            found.append((path.stem, data))
    return found


def attention_section(name: str, data: dict[str, Any]) -> list[str]:
    """Each case: torch's own form, the fastest of all, and how much faster that is."""
    cases: dict[str, list[dict[str, Any]]] = {}
    for record in data["results"]:
        if "us" in record:
            facts = {key: value for key, value in record.items() if key not in _MEASURED}
            part = facts.pop("part", "")
            case = ", ".join(f"{key} {value}" for key, value in facts.items() if value is not None)
            cases.setdefault(f"{part}: {case}", []).append(record)
    rows: list[list[str]] = []
    for case, records in cases.items():
        usual = [one for one in records if one["label"].lower().startswith(_USUAL)] or records
        torch_us, best = min(one["us"] for one in usual), min(records, key=lambda one: float(one["us"]))
        rate = f"{best['tflop_s']:.0f} TFLOP/s" if "tflop_s" in best else f"{best.get('tb_s', 0):.2f} TB/s"
        rows.append(
            [
                case,
                f"{torch_us:.1f}",
                f"{best['us']:.1f}",
                best["label"],
                f"{torch_us / best['us']:.2f}",
                rate,
            ]
        )
    head = ["case", "torch's own, µs", "fastest, µs", "which", "ratio", "rate"]
    return [f"### {name}", "", f"{data['gpu']}, torch {data['torch']}.", "", *markdown_table(head, rows)]


def prompt_section(result: dict[str, Any], figures: Path | None) -> list[str]:
    """Where the time of a prompt goes."""
    prompts = result["prompts"]
    kinds = [kind for kind in CLASSES if any(one["microseconds"][kind] > 50 for one in prompts)]
    head = ["tokens", "rows beside", "first token", "without pauses", "floor", "ticks", *kinds]
    rows = [
        [
            str(one["tokens"]),
            str(one["beside"]),
            f"{1e3 * one['seconds']:.1f}",
            f"{1e3 * one['seconds_in_a_row']:.1f}",
            f"{1e3 * one['floor_seconds']:.1f}" if "floor_seconds" in one else "-",
            " + ".join(str(tick["tokens"]) for tick in one["ticks"]),
            *(f"{one['microseconds'][kind] / 1e3:.1f}" for kind in kinds),
        ]
        for one in prompts
    ]
    return ["Milliseconds, in the engine without HTTP; the classes are of one recorded prompt, with the decode ticks "
            "that it waited for.", "", *markdown_table(head, rows)]  # fmt: skip


# kind of result, heading, section, the script that measures it
SECTIONS: tuple[tuple[str, str, Section, str], ...] = (
    ("step", "One decode step and the card's limits", step_section, "profile_step.py"),
    ("prompt", "One prompt", prompt_section, "profile_prompt.py"),
    ("idle", "Idle device", idle_section, "idle.py"),
    ("studies", "Scheduling studies", studies_section, "studies.py"),
    ("special-rows", "One unusual row among many", special_section, "special_rows.py"),
    ("kernels", "Kernels", kernels_section, "kernels.py"),
    ("agreement", "Agreement with other clients", agreement_section, "agree.py"),
)
