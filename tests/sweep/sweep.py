"""Each constant moved under each job that looks at it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from .constants import at, constants, looked_at
from .jobs import Answer, answer_of, read, with_windows

DIRECTIONS = (-1, 1)


@dataclass(frozen=True)
class Change:
    """A job whose answer is another one with one constant moved."""

    constant: str
    direction: int
    job: str
    what: str
    """"finding", "ranks", "price", or "crash"."""
    before: Answer
    after: Answer | str


@dataclass(frozen=True)
class Swept:
    """One job under all constants that it looks at."""

    job: str
    looked_at: frozenset[str]
    changes: tuple[Change, ...]


def sweep(cases: Iterable[tuple[str, str]], processes: int) -> Iterator[Swept]:
    """All cases that can be measured, in their order."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from (swept for swept in pool.map(sweep_one, cases) if swept is not None)


def sweep_one(case: tuple[str, str]) -> Swept | None:
    """One case, read once; None where it is refused."""
    prepared = read(*case)
    if prepared is None:
        return None
    job, all_of_them = "/".join(case), constants()
    with looked_at(all_of_them) as of_windows:
        prepared = with_windows(prepared)
    with looked_at(all_of_them) as of_answer:
        before = answer_of(prepared)
    names = of_windows | of_answer
    changes = []
    for constant in all_of_them:
        for direction in DIRECTIONS if constant.name in names else ():
            after: Answer | str
            with at(constant, constant.moved(direction)):
                try:
                    after = answer_of(with_windows(prepared) if constant.name in of_windows else prepared)
                except Exception as error:
                    after = f"{type(error).__name__}: {error}"
            what = "crash" if isinstance(after, str) else before.differs(after)
            if what is not None:
                changes.append(Change(constant.name, direction, job, what, before, after))
    return Swept(job, frozenset(names), tuple(changes))
