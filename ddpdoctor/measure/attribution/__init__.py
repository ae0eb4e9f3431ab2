"""Who is a straggler, with what, in which steps.

In: a graph. Out: an :class:`Attribution`: how much more each rank did of each kind of work than the others, where that stands
out of scatter. The idea: a rank is late for what it did since the ranks were last together, never for time inside a collective,
and never for what all ranks have in common. Each kind of work gets a verdict (:mod:`.attribute`) from the ranks' comparison
(:mod:`.comparison`); what verdicts say of whole cycles is spread over their segments again (:mod:`.comparison`).

A rank is late by one of these decisions. Rates are those of windows of ranks alike in which it names one, by simulation
(``tests/measure/attribution/drawn.py``):

- in every cycle: Student's test of its mean (:mod:`.lateness`), 1 %; more where work drifts in few cycles, or on a busy machine;
- in some cycles: outliers carried by few ranks (:func:`ddpdoctor.measure.numerics.carried_by_few`), 2 % for each kind of work that has
  any, in all up to 5 % of recordings of 200 cycles of 16 ranks;
- in a single cycle, and in single cycles of a short window on devices (:mod:`.lateness`): no test, as there is none of so few;
- for cores (:mod:`.starved`), 1 % to 3 %; without a recorded reason (:func:`unseen`), where it causes most of the waiting.

No rank is named where ranks are late in turn or at random (:mod:`.levels`).

A permutation test could replace the first two: permute the ranks within each block of cycles, and compare what is saved without the late
rank's excess. With R ranks and B blocks, its p-value is at least 1 / R^(B-1). At 1 % it can therefore never name one of two ranks in five
blocks, where Student's test finds 93 % (5 steps, scatter 4 %); with four ranks it finds 40 % instead of 71 % (scatter 6 %).
"""

from .attribute import UNSEEN, Attribution, attribute, component, unseen
from .comparison import in_steps, longer_alike, others_median
from .lateness import LATENESS, least_outlier, most_of
