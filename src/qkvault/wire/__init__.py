"""Between processes: one tagged message type each way, and the transports that carry it."""
