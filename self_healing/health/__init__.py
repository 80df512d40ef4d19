"""
Ranks of a job that are not as the others: one whose device computes wrong results, one that does not answer, one that
is slower than the others.
"""
