"""Capture: the queries of an engine's attention, collected row by row and stored like KV under a kind of their own."""
