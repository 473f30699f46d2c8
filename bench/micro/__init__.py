"""Benches of single paths."""
