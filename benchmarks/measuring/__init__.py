"""How long until the trace of a trained network is known to 2 %, beside other packages.

python benchmarks/measuring --fast
"""
