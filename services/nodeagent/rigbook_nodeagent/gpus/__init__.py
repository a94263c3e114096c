"""GPUs of a node: one protocol, two drivers."""
