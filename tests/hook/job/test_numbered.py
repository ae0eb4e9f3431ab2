"""The job's optimizers, loaders and models by number, however many there are."""

from ddpdoctor.hook.job import MOST_LISTED, NumberedWeakMap


class Thing:
    """As an optimizer may be: equal to all of its kind, and not hashable."""

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared with another one")


def test_numbers_stay_and_what_is_gone_is_forgotten() -> None:
    numbered: NumberedWeakMap[int] = NumberedWeakMap()
    things = [Thing() for _ in range(8000)]
    for number, thing in enumerate(things):
        assert numbered.find(thing) is None
        numbered.add(thing, None, number)
    assert [numbered.find(thing) for thing in things] == list(range(8000))
    assert numbered.count == 8000 and len(numbered.listed) == MOST_LISTED
    kept = things[5000]
    del things, thing
    assert len(numbered._known) == 1 and numbered.find(kept) == 5000
    # Whatever now lies where another one lay is new.
    assert [numbered.find(Thing()) for _ in range(100)] == [None] * 100
    numbered.add(Thing(), None, numbered.count)
    assert numbered.count == 8001 and len(numbered._known) == 1
