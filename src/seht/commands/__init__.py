"""The library's commands, one file each: arguments, and the function that runs them.

They use the library's public names and do not import the lab, whose commands are in
:mod:`seht.lab.commands`; :mod:`seht.cli` lists both.
"""
