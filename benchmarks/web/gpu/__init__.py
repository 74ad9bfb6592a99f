"""WebGPU on a real GPU, without a browser."""
