"""How a training run is described to ``ORTTrainer``."""
