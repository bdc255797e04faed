"""Which policies apply to a request: ``matching`` groups them, ``precedence`` decides which wins, ``resolver`` makes
buckets of the winners, ``cache`` keeps the snapshot. Explain runs the same code.
"""
