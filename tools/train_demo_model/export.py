"""Write a checkpoint as the model folder that ships with Helios, and the model card from its evaluation.

    python tools/train_demo_model/export.py --checkpoint DIR

Writes config.json, generation_config.json and model.safetensors (bf16) beside the tokenizer, evaluates the
written weights, and fills MODEL_CARD.md with the numbers.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from data import DEMO_MODEL, MAX_LENGTH
from evaluate import Scores, evaluate_model, held_out_set, load_model, table
from modeling import Compute, ModelConfig
from safetensors.torch import save_file
from tokenizers import Tokenizer

TITLES = {
    "qa": "questions about inference engineering, in new wordings",
    "unknown": "polite refusal of other questions",
    "count": "count numbers, letters, words",
    "echo": "repeat ASCII text",
    "unicode": "repeat emoji and non-Latin text",
    "reverse": "reverse words and lists",
    "spell": "spell words",
    "sort": "sort numbers and words",
    "arithmetic": "add and subtract below 100",
    "alphabet": "continue the alphabet",
    "recall": f"recall facts from texts of up to {MAX_LENGTH} tokens",
    "memory": "remember facts over turns",
    "style": "follow a one-line system prompt",
    "tools": "tool calls and their results",
    "json": "answer as JSON",
    "thinking": "add and subtract after thinking",
    "continue": "continue plain text",
    "wordings": "the skills above in new wordings",
}
CARD = Path(__file__).parent / "MODEL_CARD.template.md"


def write_folder(state: dict[str, torch.Tensor], config: ModelConfig, folder: Path) -> None:
    """Write the Hugging Face files but for the tokenizer's, which are there already."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end, pad = (tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>"))
    generation = {
        "bos_token_id": pad,
        "do_sample": True,
        "eos_token_id": [end, pad],
        "pad_token_id": pad,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
    }
    for name, content in (("config.json", config.to_hf(end, pad)), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    weights = {name: weight.to(torch.bfloat16).contiguous() for name, weight in state.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_card(scores: Scores, training: dict[str, Any], folder: Path) -> None:
    """Fill the template of the model card with measured numbers."""
    rows = [
        f"| {TITLES[skill]} | {100 * score['exact']:.1f} % | {score['count']:.0f} |"
        for skill, score in scores.items()
    ]
    text = CARD.read_text(encoding="utf-8").format(scores="\n".join(rows), **training)
    (folder / "MODEL_CARD.md").write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="the --out of train.py")
    parser.add_argument("--out", type=Path, default=DEMO_MODEL)
    parser.add_argument("--per-skill", type=int, default=500, help="held-out dialogues per skill")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    checkpoint = torch.load(args.checkpoint / "checkpoint.pt", map_location="cpu", weights_only=True)
    write_folder(checkpoint["model"], ModelConfig(**checkpoint["config"]), args.out)
    device = torch.device(args.device)
    model = load_model(args.out, device)
    scores = evaluate_model(model, held_out_set(args.per_skill), Compute(device))
    earlier = checkpoint["earlier"]
    training = {
        "parameters": f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}",
        "minutes": f"{(earlier['seconds'] + checkpoint['seconds']) / 60:.0f}",
        "steps": int(earlier["steps"]) + checkpoint["step"],
        "tokens": f"{(earlier['tokens'] + checkpoint['tokens']) / 1e9:.1f}",
    }
    (args.out / "evaluation.json").write_text(
        json.dumps({"training": training, "scores": scores}, indent=1) + "\n"
    )
    write_card(scores, training, args.out)
    print(table(scores))
    print(f"{sum(f.stat().st_size for f in args.out.iterdir()) / 1e6:.2f} MB in {args.out}")


if __name__ == "__main__":
    main()
