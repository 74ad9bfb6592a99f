"""Benchmarks: onnxtrain beside other engines, on the same nets, weights and data."""

import os

os.environ["ONNXTRAIN_CACHE"] = "0"  # benchmarks time builds, and replace what they depend on
