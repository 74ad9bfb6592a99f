"""Damaged models: every one is accepted and right, or refused by name, soon and in little memory.

``python -m tests.hostile 10000 --seed 1`` runs many; ``tests/hostile/test_hostile.py`` some.
"""
