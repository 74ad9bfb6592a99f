"""Files as other people have them: causes that once kept them from training."""
