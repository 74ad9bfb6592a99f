"""Pretrain a small Llama on speeches and quantize it to 4 bits with onnxruntime-genai's builder.

Runs in a separate environment with torch, transformers, tokenizers and onnxruntime-genai.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import time
from pathlib import Path

import onnxruntime_genai
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

BUILDER = Path(onnxruntime_genai.__file__).parent / "models" / "builder.py"
SPECIAL = ["<pad>", "<s>", "</s>"]
RATE = 2e-3
VALIDATION = 0.02  # fraction of the text, at its end


def tokenizer_of(text: str, size: int) -> transformers.PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on the text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(text.split("\n\n"), trainer)
    pad, start, end = SPECIAL
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=start, eos_token=end
    )


def config_of(size: int, width: int, layers: int) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        vocab_size=size,
        hidden_size=width,
        intermediate_size=width * 8 // 3 // 32 * 32,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def train(
    model: transformers.LlamaForCausalLM, ids: torch.Tensor, steps: int, batch: int, length: int
) -> None:
    """Train with AdamW and a one-cycle schedule; print the loss regularly."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, RATE, total_steps=steps + 1, pct_start=0.1
    )
    draw = torch.Generator().manual_seed(0)
    started = time.perf_counter()
    for step in range(1, steps + 1):
        starts = torch.randint(len(ids) - length, (batch,), generator=draw)
        rows = torch.stack([ids[i : i + length] for i in starts])
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps:
            throughput = step * batch * length / (time.perf_counter() - started)
            print(f"step {step}/{steps}  loss {loss:.3f}  {throughput:,.0f} tokens/s", flush=True)


@torch.no_grad()
def perplexity(model: transformers.LlamaForCausalLM, ids: torch.Tensor, length: int) -> float:
    """Return the perplexity of at most 64 rows."""
    rows = ids[: len(ids) // length * length].reshape(-1, length)[:64]
    losses = [model(input_ids=part, labels=part).loss.item() for part in rows.split(16)]
    return math.exp(sum(losses) / len(losses))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("text", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=3072)
    options = parser.parse_args()
    text = options.text.read_text(encoding="utf-8")
    tokenizer = tokenizer_of(text, options.vocabulary)
    ids = torch.tensor(tokenizer(text, return_attention_mask=False)["input_ids"])
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config_of(len(tokenizer), options.width, options.layers))
    count = sum(p.numel() for p in model.parameters())
    print(f"{len(ids):,} tokens, {count:,} parameters", flush=True)
    validation = round(len(ids) * VALIDATION)
    train(model.train(), ids[:-validation], options.steps, options.batch, options.length)
    result = perplexity(model.eval(), ids[-validation:], options.length)
    print(f"validation perplexity {result:.1f}", flush=True)
    checkpoint = options.folder / "checkpoint"
    model.save_pretrained(checkpoint)
    tokenizer.save_pretrained(checkpoint)
    command = [sys.executable, str(BUILDER), "-i", str(checkpoint)]
    command += ["-o", str(options.folder / "int4"), "-p", "int4", "-e", "cpu"]
    command += ["-c", str(options.folder / "cache")]
    built = subprocess.run(command, check=False, capture_output=True, text=True)
    if built.returncode:
        sys.exit(built.stderr)


if __name__ == "__main__":
    main()
