"""Train the MoE of 64 experts that prune.py measures, from a smaller one by Drop-Upcycling (arXiv 2502.19261).

    scripts/train_experts.py CHECKPOINT OUT TEXT... [--experts 64] [--used 6] [--layers 2] [--minutes 10]

Needs torch and transformers. CHECKPOINT is that of tiny-moe: its embeddings, attention and first layers are copied; an
expert is a copy of one of its experts of which half of the hidden columns are random, and the router is random. The
auxiliary loss balances the experts. Prints the loss of every 20th step; OUT is a checkpoint for `quantkit convert`.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

#: Tokens of a sequence, and sequences of a step.
LENGTH, BATCH = 128, 4


def upcycle(x: Any, old: Any) -> None:
    """Fill experts, [experts, n_out, n_in], with copies of fewer; every second hidden row or column stays random."""
    import torch

    generator = torch.Generator().manual_seed(2)
    n = x.shape[1] // 2 if x.shape[1] > x.shape[2] else x.shape[2]
    for e in range(len(x)):
        copied = torch.randperm(n, generator=generator)[: n // 2]
        if x.shape[1] > x.shape[2]:  # gate and up
            rows = torch.cat([copied, copied + n])
            x[e, rows] = old[e % len(old), rows]
        else:
            x[e, :, copied] = old[e % len(old)][:, copied]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("checkpoint", type=Path)
    p.add_argument("out", type=Path)
    p.add_argument("texts", type=Path, nargs="+")
    p.add_argument("--experts", type=int, default=64)
    p.add_argument("--used", type=int, default=6)
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--minutes", type=float, default=10)
    p.add_argument("--seed", type=int, default=1)
    args = p.parse_args()

    import torch
    from tokenizers import Tokenizer
    from transformers import AutoConfig, Qwen3MoeForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    config = AutoConfig.from_pretrained(args.checkpoint)
    config.num_experts, config.num_experts_per_tok, config.output_router_logits = args.experts, args.used, True
    config.router_aux_loss_coef, config.num_hidden_layers = 0.02, args.layers
    model = Qwen3MoeForCausalLM(config).float()
    source = Qwen3MoeForCausalLM.from_pretrained(args.checkpoint, dtype=torch.float32)
    old, new = source.state_dict(), model.state_dict()
    for name, x in new.items():
        if ".mlp." not in name:
            x.copy_(old[name])
        elif "experts" in name:
            upcycle(x, old[name])
    tokenizer = Tokenizer.from_file(str(args.checkpoint / "tokenizer.json"))
    texts = [text.read_text(encoding="utf-8", errors="ignore") for text in args.texts]
    tokens = np.concatenate([np.asarray(tokenizer.encode(text).ids) for text in texts])
    print(f"{len(tokens)} tokens, {sum(x.numel() for x in model.parameters()) / 1e6:.1f} M parameters", flush=True)
    experts = [x for name, x in model.named_parameters() if ".mlp." in name]
    rest_of_model = [x for name, x in model.named_parameters() if ".mlp." not in name]
    optimizer = torch.optim.AdamW(
        [{"params": experts, "lr": 1e-3}, {"params": rest_of_model, "lr": 2e-4}], betas=(0.9, 0.98), weight_decay=0.01
    )
    rng, start, step = np.random.default_rng(args.seed), time.monotonic(), 0
    rates = [group["lr"] for group in optimizer.param_groups]
    while (share := (time.monotonic() - start) / (60 * args.minutes)) < 1:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * min(1.0, (step + 1) / 20, 4 * (1 - share) + 0.05)
        begins = rng.integers(0, len(tokens) - LENGTH, BATCH)
        ids = torch.tensor(np.stack([tokens[i : i + LENGTH] for i in begins]))
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {time.monotonic() - start:.0f} s", flush=True)
        step += 1
    model.config.output_router_logits = False
    model.to(torch.bfloat16).save_pretrained(args.out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(args.checkpoint / name, args.out / name)
    print(f"{step} steps, {step * LENGTH * BATCH} tokens", flush=True)


if __name__ == "__main__":
    main()
