"""What maintainers run: versions, releases, the oldest runtime that works."""
