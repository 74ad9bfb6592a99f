"""Short programs that run in CI."""
