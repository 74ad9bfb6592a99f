"""The C++ trainer and its C interface, compared with Python's trainer."""
