"""Sliding windows: what convolutions and poolings read, and how large it is."""
