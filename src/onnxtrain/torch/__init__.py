"""Export torch modules to ONNX models that train the same way, or run them on ONNX Runtime."""

from onnxtrain.torch.export import ExportedModel, ExportReport, from_torch, last_report
from onnxtrain.torch.gradient_graph import export_gradient_graph, export_optimizer_graph
from onnxtrain.torch.module import TrainableModule

__all__ = [
    "ExportReport",
    "ExportedModel",
    "TrainableModule",
    "export_gradient_graph",
    "export_optimizer_graph",
    "from_torch",
    "last_report",
]
