"""The library's commands, one file each: arguments, and the function that runs them.

The command line stands above library and lab: it is the one place that knows both, and imports what
of the lab a command needs when that command runs.
"""
