"""The library's commands, one file each: arguments, and the function that runs them.

They take the library by its public names and know nothing of the lab, whose commands stand in
:mod:`seht.lab.commands`; :mod:`seht.cli` knows both.
"""
