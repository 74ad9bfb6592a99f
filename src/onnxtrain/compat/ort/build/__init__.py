"""The models that ``generate_artifacts`` and the other old entry points write."""
