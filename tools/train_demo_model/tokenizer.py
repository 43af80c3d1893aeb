"""Train the demo model's tokenizer: byte-level BPE in Qwen's layout, with Qwen's special tokens.

    python tools/train_demo_model/tokenizer.py

Only ASCII text is in its corpus, so every other character stays split into its UTF-8 bytes.
"""

# ruff: noqa: SIM905 - a list of words reads best as words

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from data import DEMO_MODEL, render
from dialogues import MIX, SKILLS, Gen, draw
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

VOCAB_SIZE = 4096
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# In Qwen's order; "special" tokens are hidden from decoded text, the others are not.
SPECIAL = """<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|>
<|box_end|> <|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|>
<|video_pad|>""".split()
NOT_SPECIAL = """<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|>
<|repo_name|> <|file_sep|> <tool_response> </tool_response> <think> </think>""".split()


def corpus(dialogues: int) -> Iterator[str]:
    """Texts of generated dialogues, without the special tokens and without anything beyond ASCII."""
    g = Gen("tokenizer")
    for skill in g.rng.choices(SKILLS, weights=list(MIX.values()), k=dialogues):
        for piece in render(draw(g, skill, max_characters=1500)):
            text = piece.text
            for token in (*SPECIAL, *NOT_SPECIAL):
                text = text.replace(token, "\n")
            if text.isascii():
                yield text


def build(dialogues: int) -> Tokenizer:
    """Train the tokenizer on generated dialogues."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.post_processor = processors.ByteLevel(
        add_prefix_space=False, trim_offsets=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL) - len(NOT_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(dialogues), trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in NOT_SPECIAL])
    return tokenizer


def tokenizer_config(tokenizer: Tokenizer) -> dict[str, object]:
    """tokenizer_config.json as Qwen3 has it, with this tokenizer's ids."""
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token in SPECIAL,
        }
        for token in (*SPECIAL, *NOT_SPECIAL)
    }
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": SPECIAL[1:],
        "bos_token": None,
        "chat_template": (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8"),
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 4096,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=DEMO_MODEL)
    parser.add_argument("--dialogues", type=int, default=60_000)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = build(args.dialogues)
    tokenizer.save(str(args.out / "tokenizer.json"))
    config = json.dumps(tokenizer_config(tokenizer), ensure_ascii=False, indent=2)
    (args.out / "tokenizer_config.json").write_text(config + "\n", encoding="utf-8")
    print(f"{tokenizer.get_vocab_size()} tokens in {args.out}")


if __name__ == "__main__":
    main()
