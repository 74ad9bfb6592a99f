"""What a runtime really does with single nodes: a pack of models, its runners, and profiles."""
