"""Fine-tuning of a model's own file: from a folder and texts to adapters and a model to serve."""

from onnxtrain.finetuning.arguments import FineTuneOptions
from onnxtrain.finetuning.finetune import FineTuneResult, FineTuneRun, Sample, finetune

__all__ = ["FineTuneOptions", "FineTuneResult", "FineTuneRun", "Sample", "finetune"]
