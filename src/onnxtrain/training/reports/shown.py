"""What a shell and a notebook show of a trainer."""

from __future__ import annotations

from typing import Any

from onnxtrain.artifacts.summary import Row, Shown


class ShownTrainer(Shown):
    """The part of a trainer that tells how it stands."""

    manifest: Any
    batch_specs: Any
    device: str
    layout: str
    global_step: int
    lr: Any
    seed: int

    def summary(self) -> tuple[str, list[Row]]:
        """Return what a shell shows: what a batch is, and how far training has come."""
        batch = ", ".join(
            f"{t.name} {t.dtype}[{', '.join(map(str, t.shape))}]" for t in self.batch_specs
        )
        rows = [
            ("batch", batch),
            ("step", str(self.global_step)),
            ("lr", f"{self.lr:g}"),
            ("loss", str(self.manifest.loss.get("name", ""))),
            ("optimizer", str(self.manifest.optimizer.get("name", ""))),
            ("runs on", f"{self.device}, layout {self.layout}, seed {self.seed}"),
        ]
        return "Trainer", rows


__all__ = ["ShownTrainer"]
