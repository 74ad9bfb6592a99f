"""Fine-tune an ONNX model on text or images: from a model folder and data to a model to serve.

Read in this order:

    arguments.py  ``FineTuneOptions``: options of the function and flags of the command
    finetune.py   ``finetune``: the steps of a run, its report and the files it writes
    tasks.py      data, model and loss of each kind of model
"""

from onnxtrain.finetuning.arguments import FineTuneOptions
from onnxtrain.finetuning.finetune import FineTuneResult, FineTuneRun, Sample, finetune

__all__ = ["FineTuneOptions", "FineTuneResult", "FineTuneRun", "Sample", "finetune"]
