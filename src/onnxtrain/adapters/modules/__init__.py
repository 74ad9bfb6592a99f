"""What of a file can have an adapter: its layers, their names in torch, their frozen numbers."""
