"""Rewrites that leave fewer nodes, each at least as fast as what it replaces."""
