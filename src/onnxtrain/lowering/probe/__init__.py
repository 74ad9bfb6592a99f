"""Probe a runtime: a pack of single-node models, its runners, and the resulting profile."""
