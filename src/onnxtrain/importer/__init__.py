"""Import pipeline: any ONNX graph to the normal form that every later stage assumes.

Read in this order:

    normal_form.py         ``prepare``: the steps, in order
    prepared.py            ``Prepared``: its result
    functions.py           inline local functions and function bodies of the standard
    opset.py               convert to the working opset
    constants.py           lift and fold constants, expose hidden weights
    parameters.py          decide which float tensors are parameters
    branches_and_loops.py  resolve If, Loop states and Squeeze without axes
    sequences.py           replace sequences and optionals by tensors
    ml_models.py           convert ai.onnx.ml preprocessing and linear models
"""

from onnxtrain.importer.constants import expose_weights
from onnxtrain.importer.normal_form import prepare
from onnxtrain.importer.prepared import Prepared, constant_names, mark_constants

__all__ = [
    "Prepared",
    "constant_names",
    "expose_weights",
    "mark_constants",
    "prepare",
]
