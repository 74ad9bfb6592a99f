"""Training in a browser, timed."""
