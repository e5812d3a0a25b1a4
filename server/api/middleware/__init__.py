"""The ASGI middleware of the application."""
