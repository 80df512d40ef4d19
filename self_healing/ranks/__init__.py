"""
What the ranks of a job tell each other beside its collectives: that they live, where they are, and what one of them
has failed with.
"""

from .others import OtherRanks
from .posts import Failure, Position


__all__ = ["Failure", "OtherRanks", "Position"]
