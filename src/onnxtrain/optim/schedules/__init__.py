"""Learning rates as functions of the step number."""

from onnxtrain.optim.schedules.combined import (
    Chain,
    ReduceOnPlateau,
    Warmup,
    from_dict,
    resolve_schedule,
    stretched,
)
from onnxtrain.optim.schedules.formulas import (
    SCHEDULES,
    Constant,
    Cosine,
    CosineRestarts,
    Exponential,
    Linear,
    MultiStep,
    OneCycle,
    Polynomial,
    Schedule,
    Step,
)

__all__ = [
    "SCHEDULES",
    "Chain",
    "Constant",
    "Cosine",
    "CosineRestarts",
    "Exponential",
    "Linear",
    "MultiStep",
    "OneCycle",
    "Polynomial",
    "ReduceOnPlateau",
    "Schedule",
    "Step",
    "Warmup",
    "from_dict",
    "resolve_schedule",
    "stretched",
]
