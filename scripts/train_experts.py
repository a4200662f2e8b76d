"""Train the MoE of 64 experts that prune.py measures, from a smaller one by Drop-Upcycling (arXiv 2502.19261).

    scripts/train_experts.py CHECKPOINT OUT [--experts 64] [--used 6] [--layers 2] [--steps 250] [--documents 512]

Needs torch and transformers. CHECKPOINT is that of tiny-moe: its embeddings, attention and first layers are copied; an
expert is a copy of one of its experts of which half of the hidden columns are random, and the router is random. The
text is sampled from CHECKPOINT at temperature 1, as that of the tests is, and the loss is the KL divergence from its
predictions; the auxiliary loss balances the experts. Prints the loss of every 20th step; OUT is a checkpoint for
`quantkit convert`. Everything follows from --seed, up to the rounding of another torch.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path
from typing import Any

#: Tokens of a sequence, which are those of a sampled document, and sequences of a step.
LENGTH, BATCH = 240, 4
#: Documents that are sampled together.
SAMPLES = 256


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


def sample(model: Any, n: int) -> Any:
    """Return ``n`` documents of LENGTH tokens, int64 [n, LENGTH], that begin after token 0."""
    import torch

    start, batches = torch.zeros(SAMPLES, 1, dtype=torch.int64), []
    model.generation_config.eos_token_id = None
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
    for i in range(0, n, SAMPLES):
        samples = model.generate(start, attention_mask=torch.ones_like(start), max_new_tokens=LENGTH, **settings)
        batches.append(samples[:, 1:])
        print(f"sampled {i + SAMPLES} documents", flush=True)
    return torch.cat(batches)[:n]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("checkpoint", type=Path)
    p.add_argument("out", type=Path)
    p.add_argument("--experts", type=int, default=64)
    p.add_argument("--used", type=int, default=6)
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--steps", type=int, default=250)
    p.add_argument("--documents", type=int, default=512)
    p.add_argument("--seed", type=int, default=1)
    args = p.parse_args()

    import torch
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
    print(f"{sum(x.numel() for x in model.parameters()) / 1e6:.1f} M parameters", flush=True)
    documents = sample(source.eval(), args.documents)
    experts = [x for name, x in model.named_parameters() if ".mlp." in name]
    rest_of_model = [x for name, x in model.named_parameters() if ".mlp." not in name]
    groups = [{"params": experts, "lr": 1e-3}, {"params": rest_of_model, "lr": 2e-4}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    start, rates = time.monotonic(), [group["lr"] for group in optimizer.param_groups]
    for step in range(args.steps):
        share = step / args.steps
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * min(1.0, (step + 1) / 20, 2 * (1 - share) + 0.02)
        if step * BATCH % args.documents == 0:
            order = torch.randperm(args.documents)
        ids = documents[order[torch.arange(step * BATCH, (step + 1) * BATCH) % args.documents]]
        with torch.no_grad():
            expected = source(input_ids=ids).logits.log_softmax(-1).flatten(0, 1)
        answer = model(input_ids=ids)
        logits = answer.logits.log_softmax(-1).flatten(0, 1)
        divergence = torch.nn.functional.kl_div(logits, expected, reduction="batchmean", log_target=True)
        loss = divergence + config.router_aux_loss_coef * answer.aux_loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: divergence {divergence.item():.3f}, {time.monotonic() - start:.0f} s", flush=True)
    model.config.output_router_logits = False
    model.to(torch.bfloat16).save_pretrained(args.out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(args.checkpoint / name, args.out / name)
    print(f"{args.steps} steps, {args.steps * LENGTH * BATCH} tokens", flush=True)


if __name__ == "__main__":
    main()
