"""Train the demo model on dialogues generated on the fly; resumable, and done within the time it is given.

    python tools/train_demo_model/train.py --out DIR --minutes 7 --resume

Each call (a leg) trains until `--minutes` of wall time or, over all legs, `--total-minutes` of training are
over. The learning rate follows the trained share of the total, so that the last leg always ends annealed.
"""

import argparse
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from data import TRAINED, Batch, BatchStream
from evaluate import evaluate_model, held_out_set, load_model, table
from modeling import Compute, ModelConfig, Packing, Qwen3, attend
from torch import Tensor

SMOKE_MODEL = ModelConfig(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    intermediate_size=128,
)


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal by a Newton-Schulz iteration, for the matrices in the layers.

    Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/. Matrices of one shape go together.
    """

    def __init__(
        self, params: list[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.05
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                by_shape.setdefault(p.shape, []).append(p)
            for shape, params in by_shape.items():
                for p in params:
                    if "momentum" not in self.state[p]:
                        self.state[p]["momentum"] = torch.zeros_like(p)
                buffers = [self.state[p]["momentum"] for p in params]
                gradients = [p.grad for p in params]
                torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
                updates = torch.stack(torch._foreach_lerp(gradients, buffers, group["momentum"]))
                updates = _orthogonal(updates) * max(1.0, shape[0] / shape[1]) ** 0.5
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(params, list(updates.unbind()), alpha=-group["lr"])


def _orthogonal(x: Tensor) -> Tensor:
    """The nearest orthogonal matrices, roughly. x: [matrices, rows, columns]."""
    a, b, c = 3.4445, -4.7750, 2.0315
    y = x.bfloat16() if x.is_cuda else x
    tall = y.shape[1] > y.shape[2]
    y = y.mT if tall else y
    y = y / (y.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        s = y @ y.mT
        y = a * y + (b * s + c * s @ s) @ y
    return (y.mT if tall else y).to(x.dtype)


def learning_rate(progress: float, step: int) -> float:
    """Factor of the peak rate: a short warm-up, constant until 45 % of the time, then linear to zero."""
    return min(1.0, (step + 1) / 100) * min(1.0, max(0.0, (1 - progress) / 0.55))


def check_flash_attention(config: ModelConfig, device: torch.device) -> None:
    """Compare the packed attention and its gradient with padded attention; raise if they differ."""
    starts = np.array([0, 5, 135, 440], dtype=np.int32)
    shape = (int(starts[-1]), config.num_attention_heads, config.head_dim)
    inputs = [
        torch.randn(shape[0], heads, shape[2], device=device, dtype=torch.bfloat16)
        for heads in (shape[1], shape[1] // 2, shape[1] // 2)
    ]
    weight = torch.randn(shape, device=device)
    results = []
    for flash in (True, False):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = attend(*leaves, Packing(starts, Compute(device, flash)))
        (out.float() * weight).sum().backward()
        results.append([out, *(leaf.grad for leaf in leaves)])
    for fast, plain in zip(*results, strict=True):
        error = (fast.float() - plain.float()).abs().max() / plain.float().abs().max()
        if not error < 0.05:
            raise RuntimeError(
                f"packed flash attention is off by {error:.3f} here; train with --padded-attention"
            )


def loss_of(model: Qwen3, batch: Batch, compute: Compute) -> Tensor:
    """Mean cross-entropy of the target tokens."""
    targets_at = np.flatnonzero(batch.tokens & TRAINED)
    ids = torch.from_numpy((batch.tokens & ~np.uint16(TRAINED)).astype(np.int64)).to(
        compute.device, non_blocking=True
    )
    at = torch.from_numpy(targets_at).to(compute.device, non_blocking=True)
    hidden = model(ids, Packing(batch.starts, compute))
    return F.cross_entropy(model.logits(hidden[at - 1]), ids[at])


class Trainer:
    """Model, optimizers and progress; saved and restored as one file."""

    def __init__(self, config: ModelConfig, device: torch.device, muon_lr: float, adam_lr: float) -> None:
        torch.manual_seed(0)
        self.config = config
        self.model = Qwen3(config).to(device)
        matrices = [p for name, p in self.model.named_parameters() if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in self.model.named_parameters() if p.ndim < 2 or "embed" in name]
        self.optimizers: list[torch.optim.Optimizer] = [
            Muon(matrices, lr=muon_lr),
            torch.optim.AdamW(
                others, lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=device.type == "cuda"
            ),
        ]
        self.peaks = [muon_lr, adam_lr]
        self.step = 0
        self.batch_index = 0
        self.tokens = 0
        self.seconds = 0.0  # trained, over all legs
        # Training that the starting weights had before, as their evaluation.json tells it.
        self.earlier: dict[str, float] = {"steps": 0, "tokens": 0, "seconds": 0}

    def save(self, folder: Path) -> None:
        """Write the checkpoint, then put it in the place of the last one in a single move."""
        state = {
            "config": asdict(self.config),
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "step": self.step,
            "batch_index": self.batch_index,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "earlier": self.earlier,
        }
        torch.save(state, folder / "checkpoint.tmp")
        os.replace(folder / "checkpoint.tmp", folder / "checkpoint.pt")

    def load(self, folder: Path) -> None:
        state: dict[str, Any] = torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)
        if ModelConfig(**state["config"]) != self.config:
            raise ValueError(f"the checkpoint in {folder} is of another model: {state['config']}")
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.batch_index = state["step"], state["batch_index"]
        self.tokens, self.seconds = state["tokens"], state["seconds"]
        self.earlier = state["earlier"]

    def update(self, batch: Batch, progress: float, compute: Compute) -> Tensor:
        """One optimizer step."""
        factor = learning_rate(progress, self.step)
        for optimizer, peak in zip(self.optimizers, self.peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
        loss = loss_of(self.model, batch, compute)
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += len(batch.tokens)
        return loss.detach()


def train(args: argparse.Namespace) -> Trainer:
    """Run one leg."""
    begun = time.monotonic()
    device = torch.device(args.device)
    cuda = device.type == "cuda"
    compute = Compute(device, cuda and not args.padded_attention, torch.bfloat16 if cuda else torch.float32)
    if args.smoke:
        torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(SMOKE_MODEL if args.smoke else ModelConfig(), device, args.muon_lr, args.adam_lr)
    if args.resume and (args.out / "checkpoint.pt").exists():
        trainer.load(args.out)
    elif args.init_from is not None:
        trainer.model.load_state_dict(load_model(args.init_from, device).state_dict())
        told = json.loads((args.init_from / "evaluation.json").read_text())["training"]
        trainer.earlier = {
            "steps": int(told["steps"]),
            "tokens": float(told["tokens"]) * 1e9,
            "seconds": float(told["minutes"]) * 60,
        }
    stream = BatchStream(args.seed, trainer.batch_index, args.tokens, args.workers)
    try:
        if compute.flash:
            check_flash_attention(trainer.config, device)
        if cuda and not args.no_compile:
            trainer.model.compile_parts()
        parameters = sum(p.numel() for p in trainer.model.parameters())
        print(f"{parameters / 1e6:.2f} M parameters, from step {trainer.step}", flush=True)
        _leg(trainer, stream, compute, args, begun)
    finally:
        stream.close()
    trainer.save(args.out)
    scores = evaluate_model(trainer.model, held_out_set(args.final_eval), compute)
    (args.out / "scores.json").write_text(json.dumps(scores, indent=1))
    print(table(scores))
    complete = trainer.seconds >= 60 * args.total_minutes
    print(f"step {trainer.step}, {trainer.seconds:.0f} s trained, leg took {time.monotonic() - begun:.0f} s")
    print("training is complete" if complete else "training is not complete: run again with --resume")
    return trainer


def _leg(
    trainer: Trainer, stream: BatchStream, compute: Compute, args: argparse.Namespace, begun: float
) -> None:
    """Train until this leg's time, the total time or the steps are over."""
    budget = 60 * args.total_minutes
    quick = held_out_set(args.quick_eval)
    last = shown = evaluated = time.monotonic()
    first_step, shown_tokens = trainer.step, trainer.tokens
    for batch in stream:
        trainer.batch_index = stream.index
        loss = trainer.update(batch, trainer.seconds / budget, compute)
        now = time.monotonic()
        if trainer.step - first_step > 3:  # compilation is not training time
            trainer.seconds += now - last
        last = now
        if now - shown > args.show_every:
            rate = (trainer.tokens - shown_tokens) / (now - shown) / 1e6
            print(
                f"step {trainer.step} loss {loss.item():.4f} "
                f"lr {learning_rate(trainer.seconds / budget, trainer.step):.2f}, "
                f"{trainer.seconds:.0f} s trained, {rate:.2f} M tokens/s, {stream.replayed} batches replayed",
                flush=True,
            )
            shown, shown_tokens = now, trainer.tokens
        if now - evaluated > args.eval_every:
            scores = evaluate_model(trainer.model, quick, compute)
            print(
                "held-out", *(f"{skill} {score['exact']:.2f}" for skill, score in scores.items()), flush=True
            )
            trainer.save(args.out)
            last = shown = evaluated = time.monotonic()
            shown_tokens = trainer.tokens
        out_of_time = now - begun > 60 * args.minutes - args.reserve
        if trainer.seconds >= budget or out_of_time or trainer.step - first_step >= args.max_steps:
            return


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument(
        "--minutes", type=float, default=7.0, help="wall time of this leg, start and evaluation included"
    )
    parser.add_argument("--total-minutes", type=float, default=12.0, help="training time over all legs")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the checkpoint in --out, if there is one"
    )
    parser.add_argument(
        "--init-from",
        type=Path,
        help="start from the weights of an exported model folder, not from random ones",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=131_072, help="tokens of one batch and optimizer step")
    parser.add_argument(
        "--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="processes that make batches"
    )
    parser.add_argument("--muon-lr", type=float, default=0.015)
    parser.add_argument("--adam-lr", type=float, default=0.004)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument(
        "--padded-attention", action="store_true", help="do without the packed flash attention"
    )
    parser.add_argument(
        "--quick-eval", type=int, default=48, help="held-out dialogues per skill, evaluated now and then"
    )
    parser.add_argument(
        "--final-eval", type=int, default=256, help="held-out dialogues per skill at the end of the leg"
    )
    parser.add_argument("--eval-every", type=float, default=60.0, help="seconds")
    parser.add_argument("--show-every", type=float, default=10.0, help="seconds")
    parser.add_argument("--reserve", type=float, default=25.0, help="seconds kept for the end of the leg")
    parser.add_argument("--max-steps", type=int, default=10**9, help="steps of this leg")
    parser.add_argument("--smoke", action="store_true", help="a toy model and toy batches: seconds on a CPU")
    args = parser.parse_args(argv)
    if args.smoke:
        args.tokens, args.workers, args.quick_eval, args.final_eval = 4096, 1, 1, 1
        args.max_steps, args.show_every, args.eval_every, args.reserve = (
            min(args.max_steps, 10),
            0.5,
            2.0,
            0.0,
        )
    return args


if __name__ == "__main__":
    train(parse_args())
