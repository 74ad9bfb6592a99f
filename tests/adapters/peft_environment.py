"""An environment with torch, transformers and peft, in which ``peft_check`` runs.

``python -m tests.adapters.peft_environment`` makes it below ``.cache/wild``; it needs the network.
"""

from __future__ import annotations

from tests.wild.produce import COMMON, TORCH, Environment

PEFT = Environment(
    "venv-peft",
    ((TORCH,), (*COMMON, "transformers==5.22.2", "peft==0.21.2", "ml_dtypes", "typer", "rich")),
)

if __name__ == "__main__":
    PEFT.make()
    print(PEFT.python)
