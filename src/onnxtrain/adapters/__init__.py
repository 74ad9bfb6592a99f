"""LoRA and DoRA adapters.

Read in this order:

    lora.py         ``lora``, ``load_adapter`` and their result ``Adapted``
    layers.py       find the layers of a graph and the torch modules they implement
    families.py     module names per model family
    branches.py     add adapters to a graph
    merge.py        fold adapters into the weights
    peft.py         read and write PEFT directories
    ort_adapter.py  write ``.onnx_adapter`` files and their base model
"""

from onnxtrain.adapters.branches import Adapter
from onnxtrain.adapters.lora import Adapted, load_adapter, lora
from onnxtrain.adapters.merge import MergeResult

__all__ = ["Adapted", "Adapter", "MergeResult", "load_adapter", "lora"]
