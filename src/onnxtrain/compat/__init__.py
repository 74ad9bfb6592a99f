"""Entry points for people who come from other libraries: they change only the import."""
