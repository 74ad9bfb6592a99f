"""The torch and PEFT side, with the same shape, rank and batch."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch

from benchmarks.finetuning.encoder import LINEAR, Encoder
from benchmarks.finetuning.serve import device_memory, serve
from benchmarks.finetuning.shapes import SHAPES


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    on_device = None if args.device == "cpu" else device_memory()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    torch.set_flush_denormal(True)
    net = adapted(args.model).to(args.device, getattr(torch, args.dtype)).train()
    with np.load(args.data) as file:
        batch = {n: torch.from_numpy(file[n]).to(args.device) for n in file.files}
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)

    def step() -> float:
        loss = loss_of(net, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    serve(step, on_device)


def adapted(name: str) -> Any:
    """Return the module with adapters of rank 8 on all linear layers."""
    from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]

    if name == "encoder":
        return get_peft_model(Encoder(), LoraConfig(r=8, lora_alpha=16, target_modules=[*LINEAR]))
    from transformers import LlamaConfig, LlamaForCausalLM

    s = SHAPES[name]
    config = LlamaConfig(
        vocab_size=s.vocabulary,
        hidden_size=s.hidden,
        intermediate_size=s.inner,
        num_hidden_layers=s.layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.groups,
        max_position_embeddings=s.positions,
        tie_word_embeddings=True,
        use_cache=False,
    )
    parts = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    rank = LoraConfig(r=8, lora_alpha=16, target_modules=parts, task_type="CAUSAL_LM")
    return get_peft_model(LlamaForCausalLM(config), rank)


def loss_of(net: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss of one batch."""
    if "attention_mask" in batch:
        return net(**batch).loss
    return torch.nn.functional.cross_entropy(net(batch["input_ids"]).float(), batch["labels"])


if __name__ == "__main__":
    main()
