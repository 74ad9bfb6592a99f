"""Export torch modules to ONNX models that train the same way, or run them on ONNX Runtime."""

from onnxtrain.torch.export import ExportedModel, ExportReport, from_torch, last_report
from onnxtrain.torch.gradient_graph import export_gradient_graph, export_optimizer_graph
from onnxtrain.torch.losses import from_torch_loss
from onnxtrain.torch.module import TrainableModule
from onnxtrain.torch.onnx_module import OnnxModule, as_module

__all__ = [
    "ExportReport",
    "ExportedModel",
    "OnnxModule",
    "TrainableModule",
    "as_module",
    "export_gradient_graph",
    "export_optimizer_graph",
    "from_torch",
    "from_torch_loss",
    "last_report",
]
