"""Finds stragglers, the work that makes them late, and the steps in which they are late.

In: a graph. Out: an :class:`Attribution`: the excess of each rank over the others for each kind of work, if it is significant.
A rank is late because of what it did since the last synchronisation, never because of time inside a collective or of work that all ranks
have in common. :mod:`.comparison` compares the ranks, :mod:`.attribute` reaches a verdict for each kind of work and distributes the
excess of whole cycles over their segments.

A rank is late by one of these criteria. The rates are false-positive rates in windows of equal ranks, measured by simulation
(``tests/measure/attribution/drawn.py``):

- in every cycle: Student's test of the mean (:mod:`.lateness`), 1 %; more if work drifts in few cycles, or on a busy machine;
- in some cycles: outliers of a few ranks (:func:`ddpdoctor.measure.numerics.outliers_of_few_ranks`), 2 % for each kind of work that has
  outliers, in total up to 5 % of recordings of 200 cycles of 16 ranks;
- in a single cycle, and in single cycles of a short window on devices (:mod:`.lateness`): no test, because there are too few values;
- CPU contention (:mod:`.starved`), 1 % to 3 %;
- no recorded reason (:func:`unseen_lateness`): the rank causes most of the waiting.

No rank is named if the late rank rotates or is random (:mod:`.levels`).

A permutation test could replace the first two: permute the ranks within each block of cycles, and compare the savings without the late
rank's excess. With R ranks and B blocks, its p-value is at least 1 / R^(B-1). At 1 % it can therefore never name one of two ranks in five
blocks, where Student's test finds 93 % (5 steps, scatter 4 %); with four ranks it finds 40 % instead of 71 % (scatter 6 %).

An effective number of cycles, from their autocorrelation (lag 1, pooled over the ranks), does not help either, because few cycles do not
show it. If half of the variance drifts, it names one of two ranks in 6 instead of 10 % of windows of five cycles, and in 11 instead of
12 % of ten cycles; if all does, in 29 instead of 36 %, and 13 instead of 24 %. A rank that is late by a tenth in five cycles is then found
in 50 instead of 57 % (two ranks, scatter 6 %), and 53 instead of 65 % (four). So texts do not say of few steps that lateness lasts.
"""

from .attribute import UNSEEN, Attribution, attribute, component, unseen_lateness
from .comparison import others_median, proportional_gap_excess, values_in_steps
from .lateness import LATENESS, least_outlier, main_stragglers
