"""The weight of the penalty in each step: a number, a share, a tuned weight or a recorded path.

`weight` has the interface, and the weights that are numbers or paths. `share_weight` and
`tuned_weight` find theirs by looking at gradients (`products`, `held_out`), the latter by the rule
in `tuning` and `phase`. `arguments` picks one from the user's arguments, and `schedule` says which
steps are penalised. Only the penalty and what is above it may import from here.
"""
