"""Files as a neighbour, a broken disk or another program may leave them: whatever we are given ends in a diagnosis or in one
sentence, soon and in little memory.

``python -m tests.fuzz --seed N --cases N --only KIND`` mutates small files of every kind that is read and gives each to a
command; ``--case I`` repeats one case. See :mod:`.kinds` for what is mutated, :mod:`.trial` for what counts as a failure.
"""
