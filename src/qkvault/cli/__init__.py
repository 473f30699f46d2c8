"""The command ``qkvault``: one file a command, each loading what it needs when it is chosen."""
