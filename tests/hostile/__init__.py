"""Damaged models: every one is accepted and right, or refused by name, soon and in little memory.

``python -m tests.hostile --cases 10000 --seed 1`` runs many, ``test_hostile.py`` some.
"""
