"""The directory that is put on `PYTHONPATH`."""
