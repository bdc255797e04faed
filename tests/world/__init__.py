"""The world: the package in the servers and workers that projects run, through forks, signals, kills and clocks.

Run by ``make world``. Each scene asserts the same four things, see ``scene``.
"""
