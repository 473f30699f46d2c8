"""Benches of a whole serving engine."""
