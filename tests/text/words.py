"""A tokenizer trained on a few sentences, with its configuration files."""

from __future__ import annotations

import json
from pathlib import Path

CORPUS = [
    "the cat sat on the mat and looked at the dog",
    "what does the cat say? the cat says meow and the dog says woof",
    "a dog ran to the house; the mouse ran away from the cat",
    "User: hello\nAssistant: hello, how are you today?\n",
] * 3
SPECIAL = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path, size: int = 96, *, template: str | None = CHATML) -> Path:
    """Write tokenizer.json and tokenizer_config.json; return the folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "</s>", "bos_token": "<s>", "pad_token": {"content": "<pad>"}}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_lines(path: Path, *rows: object) -> Path:
    """Write a JSONL file; strings are written unchanged."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
