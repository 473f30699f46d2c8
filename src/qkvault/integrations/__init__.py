"""Serving engines. None imports another; nothing but the command imports them."""
