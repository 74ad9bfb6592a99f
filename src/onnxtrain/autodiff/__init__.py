"""Reverse-mode differentiation of ONNX graphs.

Read in this order:

    differentiate.py  the reverse sweep
    rule_registry.py  gradient rules by operator, and variants of a rule per target
    rules/            the rules, one file per family of operators
    gradients.py      public functions: vjp, grad, jvp
    selection.py      what ``wrt``, ``train`` and ``outputs`` select
    recompute.py      activation checkpointing
    split.py          forward and backward as two models
    explain.py        how each node would be differentiated
"""
