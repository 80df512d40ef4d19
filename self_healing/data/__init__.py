"""
Samples and rows that cannot be used: found where they are loaded, replaced or left out, and written down.

Which row of a step makes it fail is found in `numerics/`; data of a run that has not begun are looked at in
`inspection`.
"""
