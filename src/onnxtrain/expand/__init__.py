"""Operator expansions, one file per family; :mod:`onnxtrain.expand.expansions` is the registry."""

from importlib import import_module
from pkgutil import iter_modules

for _module in sorted(m.name for m in iter_modules(__path__)):
    import_module(f"{__name__}.{_module}")
