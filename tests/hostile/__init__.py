"""Mutated model files: each runs correctly or raises a named error, fast and in little memory.

``python -m tests.hostile --cases 10000 --seed 1`` runs many cases, ``test_hostile.py`` some.
"""
