"""Experiments with `seht`. They need the extra `seht[lab]`; the library never imports them.

Only the command line does, when a command of the lab runs.
"""
