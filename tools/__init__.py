"""Commands for maintainers: versions, releases, the oldest supported runtime."""
