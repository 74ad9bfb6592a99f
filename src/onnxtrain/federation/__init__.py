"""A federation as files and processes: the project that flwr runs, the server that pages reach."""

from onnxtrain.federation.project import write_project

__all__ = ["write_project"]
