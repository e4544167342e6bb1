"""A differential fuzzer: random training programs under random compositions of strategies, against one process.

``python -m tests.fuzz --help``; CONTRIBUTING tells how to use it.
"""
