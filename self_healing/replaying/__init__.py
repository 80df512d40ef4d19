"""
Computes the step of a saved incident again, in another process: the model is built again, the batch is the one that
was kept, and the first number that is not finite is looked for.
"""
