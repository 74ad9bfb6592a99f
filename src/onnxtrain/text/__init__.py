"""Language models: their inputs, data and generation.

What needs ``tokenizers`` or ``jinja2`` says so when it is used: ``pip install onnxtrain[text]``.
"""

from onnxtrain.text.batches import TokenBatches, inputs_for, pack
from onnxtrain.text.examples import Example, Examples, from_arrays, make_examples
from onnxtrain.text.folder import ModelFolder, look_at
from onnxtrain.text.generate import generate
from onnxtrain.text.pooling import pooled, with_classifier
from onnxtrain.text.preview import preview
from onnxtrain.text.records import Records, read_records
from onnxtrain.text.tokenizer import Tokenizer
from onnxtrain.text.without_cache import without_cache

__all__ = [
    "Example",
    "Examples",
    "ModelFolder",
    "Records",
    "TokenBatches",
    "Tokenizer",
    "from_arrays",
    "generate",
    "inputs_for",
    "look_at",
    "make_examples",
    "pack",
    "pooled",
    "preview",
    "read_records",
    "with_classifier",
    "without_cache",
]
