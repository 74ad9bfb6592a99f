"""Checks that keep a trainer and its files from silent harm, one file each."""
