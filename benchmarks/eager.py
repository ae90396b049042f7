"""What users would pick instead: diffusers' blocks with PEFT's LoRA in PyTorch, each block checkpointed. Prints one JSON line.

python -m benchmarks.eager sana-0.6b middle --steps 5 --threads 2
"""

import argparse
import json
import statistics
import time

import diffusers
import peft
import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.synthetic import WORKS, random_like
from host.model_costs import ModelCosts
from runtime.memory import MemoryWatch


def main() -> None:
    """Trains the middle blocks at the work's patch size, or the whole model at 512 px."""
    parser = argparse.ArgumentParser()
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("blocks", choices=("middle", "whole"))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    work, watch = WORKS[options.work], MemoryWatch()
    side = work.patch_side if options.blocks == "middle" else 512
    costs = ModelCosts(
        work.config, side, prompt_tokens=work.prompt_tokens, latent_factor=work.latent_factor, lora_rank=4
    )
    skipped = sum(work.cut) if options.blocks == "middle" else 0
    num_blocks = len(costs.blocks) - skipped
    transformer = getattr(diffusers, work.config["_class_name"]).from_config(work.config | {"num_layers": num_blocks})
    transformer.requires_grad_(False)
    transformer.add_adapter(peft.LoraConfig(r=4, lora_alpha=4, target_modules=list(costs.targets)))
    parameters = [p for p in transformer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    generator = torch.Generator().manual_seed(0)
    conditioning = {name: random_like(value, generator) for name, value in costs.conditioning.items()}
    hidden, target = (random_like(costs.hidden, generator) for _ in range(2))
    seconds = []
    with watch:
        for _ in range(options.steps + 1):
            start, state = time.perf_counter(), hidden.clone().requires_grad_(True)
            for index in range(num_blocks):

                def run(x: torch.Tensor, index: int = index) -> torch.Tensor:
                    return costs.adapter.run_block(transformer, index, x, conditioning, costs.grid)

                state = checkpoint(run, state, use_reentrant=False)
            (state - target).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - start)
    step_ms = [1e3 * value for value in seconds[1:]]
    print(
        json.dumps(
            {
                "blocks": num_blocks,
                "tokens": costs.hidden.shape[1],
                "step_ms": statistics.median(step_ms),
                "spread_ms": [min(step_ms), max(step_ms)],
                "peak_private_bytes": watch.peak_private_bytes,
            }
        )
    )


if __name__ == "__main__":
    main()
