"""Language models: their inputs, data, fine-tuning and generation.

What needs ``tokenizers`` or ``jinja2`` says so when it is used: ``pip install onnxtrain[text]``.
"""

from onnxtrain.text.without_cache import without_cache

__all__ = ["without_cache"]
