"""netron shows a file in a browser; nothing here looks at it."""


def start(file: str) -> None:
    """Open nothing."""
    del file
