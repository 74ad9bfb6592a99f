"""Steps on an NVIDIA GPU, run by hand on a machine that has one."""
