"""Graphs that update parameters, in the layouts that runtimes bind."""
