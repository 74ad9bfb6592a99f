"""Fine-tuning of a model's own file: from a folder and texts to adapters and a model to serve."""

from onnxtrain.finetuning.finetune import FineTuned, FineTuning, Sample, finetune
from onnxtrain.finetuning.options import FineTuneOptions

__all__ = ["FineTuneOptions", "FineTuned", "FineTuning", "Sample", "finetune"]
