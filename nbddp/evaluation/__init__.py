"""What a validation computes: the user's step on batches, what it returns, and the metrics, reduced over the ranks.

Runs in the ranks, and alone in the kernel, which gets the same numbers. Imports neither Jupyter nor the packages `kernel` and `worker`.
"""
