"""Rewrites for runtimes on GPUs."""
