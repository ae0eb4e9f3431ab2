"""Who is a straggler, with what, in which steps.

In: a graph. Out: an :class:`Attribution`: how much more each rank did of each kind of work than the others, where that stands
out of scatter. The idea: a rank is late for what it did since the ranks were last together, never for time inside a collective,
and never for what all ranks have in common. Each kind of work gets a verdict (:mod:`.judging`) from the ranks' comparison
(:mod:`.comparison`); what verdicts say of whole cycles is spread over their segments again (:mod:`.comparison`).
"""

from .attribute import UNSEEN, attribute, unseen
from .attribution import Attribution, component
from .comparison import others_median
from .lateness import LATENESS
from .standout import STANDOUT
