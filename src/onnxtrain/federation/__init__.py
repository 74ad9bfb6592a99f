"""Files and processes of a federation: the ``flwr run`` project, and the server for web pages."""

from onnxtrain.federation.project import write_project

__all__ = ["write_project"]
