"""
Calls of services that may fail temporarily, and trackers that fail.

Which callables of a trainer are services is known in `instrument/`; how a call is made again, in `retry`, whose public
names are those of this room as well.
"""

from ..retry import Retry, RetryPolicy, may_pass, retry_after


__all__ = ["Retry", "RetryPolicy", "may_pass", "retry_after"]
