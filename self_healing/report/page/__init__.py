"""The report of a run as one HTML page that needs nothing else: no server and no network."""

from .rendering import page_of, write_page


__all__ = ["page_of", "write_page"]
