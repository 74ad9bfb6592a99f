"""Stand-ins of our own for packages that programs of other projects import.

``install("mlprodict")`` makes ``import mlprodict`` and the import of any of its submodules give the
names of ``stubs/mlprodict.py``: which submodule had a function does not matter here.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence


def install(*names: str) -> None:
    """Stand in for these packages in this process."""
    for name in names:
        importlib.import_module(f"{__name__}.{name}")
        sys.meta_path.insert(0, _Finder(name))


class _Stub(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        package = self.__name__.partition(".")[0]
        return getattr(importlib.import_module(f"{__name__}.{package}"), name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Find a package and its submodules."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if fullname.partition(".")[0] != self.name:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        del module
