"""The `rigbook` command and the small Python client (`rigbook.client.Client`)."""

__version__ = "0.1.0"
