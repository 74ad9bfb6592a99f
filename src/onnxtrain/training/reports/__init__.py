"""What a run tells: on the screen, in files, in notebooks."""
