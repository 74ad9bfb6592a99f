"""What a model is lowered to: an opset, and what a runtime knows of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from onnxtrain.lowering.forms import UnfitError, draft_at
from onnxtrain.lowering.profile import Profile, objection

_IR_VERSIONS = {7: 3, 8: 3, 9: 4, 10: 5, 11: 6, 12: 7, 13: 7, 14: 7, 15: 8, 16: 8, 17: 8, 18: 8}
_IR_VERSIONS |= {19: 9, 20: 9, 21: 10, 22: 10, 23: 11, 24: 12, 25: 12, 26: 13}
OLDEST, NEWEST = min(_IR_VERSIONS), max(_IR_VERSIONS)


@dataclass(frozen=True)
class Destination:
    """An opset, and a profile if there is one."""

    opset: int
    working: int
    """The opset that the model is in while it is lowered."""
    profile: Profile | None = None
    sizes: list[str] = field(default_factory=list)
    """Symbolic sizes of the inputs, for messages."""

    @property
    def title(self) -> str:
        """Return opset and runtime in words."""
        where = f"opset {self.opset}"
        return f"{self.profile.name} ({where})" if self.profile is not None else where

    @property
    def ir_version(self) -> int:
        """Return the IR version that came with the opset, within what the profile reads."""
        version = _IR_VERSIONS[self.opset]
        if self.profile is not None:
            low, high = self.profile.ir
            version = min(max(version, low), high)
        return version

    @property
    def initializers_as_inputs(self) -> bool:
        """Return whether every initializer has to be listed among the inputs."""
        asked = self.profile is not None and self.profile.initializers_as_inputs
        return asked or self.ir_version < 4

    def obstacle(self, node: ir.Node) -> str | None:
        """Say why the target cannot run a node, ``None`` if it can."""
        try:
            drafted = draft_at(node, min(self.opset, self.working), self.working)
        except UnfitError as error:
            return str(error)
        return None if self.profile is None else objection(self.profile, drafted, self.opset)
