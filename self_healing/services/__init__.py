"""Calls of services that may fail for the moment, and trackers that fail."""

from ..retry import Retry, RetryPolicy, may_pass, retry_after


__all__ = ["Retry", "RetryPolicy", "may_pass", "retry_after"]
