"""How fast metasam is beside what one would pick instead: the command ``metasam-bench``.

`run` is the command, `works` says what is measured, `contest` measures it in turns, `process` does so in processes of
their own, `report` writes it down. `meta_steps`, `optimizers` and `samplers` hold the contenders that are ours or
written by hand, `peers` those of other packages.

A contender is a name and a callable that makes what is timed: to add one, give it a line there.
"""
