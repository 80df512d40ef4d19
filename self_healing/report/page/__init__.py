"""The report of a run as one HTML page that needs nothing else: no server, no network, and no script to be read."""

from .rendering import page_of, write_page


__all__ = ["page_of", "write_page"]
