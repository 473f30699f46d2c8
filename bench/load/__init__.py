"""Many clients of one server at a time."""
