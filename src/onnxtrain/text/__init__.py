"""Language models: model folders, tokenizers, training data and generation.

``tokenizers`` and ``jinja2`` are optional: ``pip install onnxtrain[text]``.
"""

from onnxtrain.text.data import (
    Example,
    Examples,
    Records,
    TokenBatches,
    collate,
    from_arrays,
    make_examples,
    pack,
    preview,
    read_records,
)
from onnxtrain.text.generate import generate
from onnxtrain.text.model_folder import (
    ModelFolder,
    add_classifier,
    add_pooling,
    add_token_classifier,
    inspect_model,
    without_cache,
)
from onnxtrain.text.tokenizer import Tokenizer

__all__ = [
    "Example",
    "Examples",
    "ModelFolder",
    "Records",
    "TokenBatches",
    "Tokenizer",
    "add_classifier",
    "add_pooling",
    "add_token_classifier",
    "collate",
    "from_arrays",
    "generate",
    "inspect_model",
    "make_examples",
    "pack",
    "preview",
    "read_records",
    "without_cache",
]
