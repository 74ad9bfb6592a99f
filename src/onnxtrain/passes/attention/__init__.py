"""Attention on GPUs: masks, keys, scores and what the backward pass makes of them."""
