"""Benchmarks: onnxtrain beside other engines, on the same nets, weights and data."""
