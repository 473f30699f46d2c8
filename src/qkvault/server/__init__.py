"""The server: a store in a process of its own, for every engine of the machine. Loads no torch."""
