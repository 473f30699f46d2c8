"""The decisions: what is cached where, who may read or write it, who leaves first.

A state machine over values: no torch, socket, thread, clock or logger. ``driver`` is the only file with a loop.
"""
